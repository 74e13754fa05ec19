"""Executes step plans with the model over one paged KV pool."""

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from kernels.kv_rows import row_items
from services.engine.choosing import choose
from services.engine.grammars import Grammars
from services.engine.last_tokens import LastTokens
from services.engine.model import Model
from services.engine.model_spec import KVDtype, ModelSpec, kv_spec
from services.engine.step_batch import build_batch
from services.engine.types import Move, StepPlan, StepResult
from shared.hashing import block_digest
from shared.ids import BlockDigest, BlockId

_TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def configure_threads(num_threads: int) -> None:
    """Threads of torch's ops in this process. Call once, before the first step."""
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def view_pool(
    region: memoryview | bytearray, num_blocks: int, spec: ModelSpec, block_size: int, kv_dtype: KVDtype
) -> torch.Tensor:
    """A region as the pool that `Model.forward` takes: `[num_blocks, kv_heads, layers, 2, block_size, row]`."""
    dtype = _TORCH_DTYPES[kv_dtype]
    row = row_items(spec.head_dim, dtype)
    return torch.frombuffer(region, dtype=dtype).view(
        num_blocks, spec.num_kv_heads, spec.num_layers, 2, block_size, row
    )


class ModelRunner:
    """Implements `services.engine.types.Runner`.

    The pool is a view of the caller's region, which it may share with other processes (readers of announced
    blocks). The runner writes blocks that a plan names, and no others. One step at a time.
    """

    def __init__(
        self,
        model: Model,
        region: memoryview,
        num_blocks: int,
        *,
        block_size: int,
        kv_dtype: KVDtype = "float32",
        num_threads: int = 1,
        num_bays: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        """:param region: writable, contiguous, `num_blocks * block_bytes` long. Kept until `close`.
        :param num_bays: room in host memory for so many parked blocks.
        """
        spec = model.spec
        self.spec, self.kv = spec, kv_spec(spec, block_size, kv_dtype)
        self.num_blocks, self.block_size = num_blocks, block_size
        assert not region.readonly, "the region must be writable"
        assert region.nbytes == num_blocks * self.block_bytes, "the region must hold exactly num_blocks blocks"
        self._model, self._num_threads = model, num_threads
        self._grammars, self.num_bays = grammars, num_bays
        self._last = LastTokens()
        self._bays = np.frombuffer(mmap.mmap(-1, max(1, num_bays * self.block_bytes)), np.uint8)[
            : num_bays * self.block_bytes
        ].reshape(num_bays, self.block_bytes)  # parked blocks; memory is taken when a bay is first used
        self._bytes = region.cast("B")
        self._pool = view_pool(self._bytes, num_blocks, spec, block_size, kv_dtype)

    @property
    def block_bytes(self) -> int:
        return self.kv.block_bytes

    def move(self, parks: Sequence[Move], restores: Sequence[Move]) -> None:
        """See `services.engine.types.Runner`."""
        pool = np.frombuffer(self._bytes, np.uint8).reshape(self.num_blocks, self.block_bytes)
        for block, bay in parks:
            self._bays[bay] = pool[block]
        for block, bay in restores:
            pool[block] = self._bays[bay]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copies, then one forward pass over all rows, then samples and digests. Mutates the pool.

        :raises ModelError: the logits are not finite.
        """
        pending = self._last.take(plan)
        self._copy(plan.copies)
        if plan.items:
            batch = build_batch(plan.items, self.block_size, pending)
            logits = self._model.forward(batch, self._pool, self._num_threads)
            result = choose(plan.items, logits, self._digests(plan), self._num_threads, self._grammars)
        else:
            result = StepResult((), self._digests(plan))
        self._last.put(plan, result.sampled)
        return result

    def close(self) -> None:
        """Let go of the region. No step may follow."""
        del self._pool
        self._bytes.release()

    def _copy(self, copies: tuple[tuple[BlockId, BlockId], ...]) -> None:
        if copies:
            sources, targets = zip(*copies, strict=True)
            raw = self._pool.view(torch.uint8)  # torch does not index 8-bit floats
            raw[list(targets)] = raw[list(sources)]

    def _digests(self, plan: StepPlan) -> tuple[BlockDigest, ...]:
        return tuple(self._digest(block) for block in plan.digest_blocks)

    def _digest(self, block: BlockId) -> BlockDigest:
        return block_digest(self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes])
