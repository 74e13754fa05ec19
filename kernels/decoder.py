"""A decoder's forward pass in one C++ call: arrays in, logits out, the KV pool changed on the way.

For the models of `services.engine.model_spec` on a CPU. `kernels.reference` has the same arithmetic in torch, op by op.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_rows import CACHE_DTYPES, head_dim_of
from kernels.packing import Format

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def extension() -> ModuleType | None:
    """The C++ bodies, or None where they were not built."""
    try:
        from kernels.cpu import _kernels
    except ImportError:
        return None
    return _kernels


_kernels = extension()


def is_available() -> bool:
    """Whether the extension was built."""
    return _kernels is not None


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`data` is the packed form of `[num_outputs, num_inputs]`; see `kernels.packing`."""

    fmt: Format
    num_outputs: int
    num_inputs: int
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """Weights of one layer, and how it attends. What is None the model does not have."""

    attn_norm: Floats  # [hidden]
    qkv: tuple[PackedMatrix, ...]  # together [(heads + 2 * kv_heads) * head_dim, hidden]
    o: PackedMatrix  # [hidden, heads * head_dim]
    mlp_norm: Floats  # [hidden]
    gate_up: PackedMatrix  # blocks of gate and up in turns, `kernels.packing.interleave`
    down: PackedMatrix  # [hidden, intermediate]
    qkv_bias: Floats | None = None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Floats | None = None  # [head_dim], of each head, before RoPE
    k_norm: Floats | None = None
    attn_post_norm: Floats | None = None  # [hidden], of what attention adds to the residual
    mlp_post_norm: Floats | None = None
    window: int = 0  # a row sees the last so many tokens, itself included; 0: all
    rope: int = 0  # which of the model's; -1: none


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    attention_scale: float  # of q k^T
    embed_scale: float = 1.0
    attention_softcap: float = 0.0  # x becomes cap * tanh(x / cap); 0: it stays
    logit_softcap: float = 0.0
    gelu: bool = False  # GELU (tanh form) in place of SiLU


class Decoder:
    """Weights of a model, ready to run. A row's results have the same bits whatever else is in the step."""

    def __init__(
        self,
        shape: DecoderShape,
        inverse_frequencies: Floats,
        rope_scales: Floats,
        embed: PackedMatrix,
        layers: Sequence[LayerMatrices],
        norm: Floats,
        head: PackedMatrix,
        *,
        simd: bool = True,
    ) -> None:
        """
        :param inverse_frequencies: of each RoPE, float32 `[num_ropes, head_dim / 2]`.
        :param rope_scales: what each RoPE's cosines and sines are multiplied by, `[num_ropes]`.
        :param simd: False takes the scalar body.
        """
        assert _kernels is not None, "the extension is not built"
        self._kept = (embed, tuple(layers), norm, head)  # the extension holds their addresses
        self._simd, self._vocab = simd, shape.vocab_size
        sizes = _kernels.DecoderShape(
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.vocab_size,
            shape.rms_eps,
            shape.embed_scale,
            shape.attention_scale,
            shape.attention_softcap,
            shape.logit_softcap,
            shape.gelu,
        )
        self._decoder = _kernels.Decoder(sizes, inverse_frequencies, rope_scales, _matrix(embed), _matrix(head), norm)
        for layer in layers:
            columns = np.cumsum([0, *(part.num_outputs for part in layer.qkv)]).tolist()
            parts = [(first, _matrix(part)) for first, part in zip(columns[:-1], layer.qkv, strict=True)]
            self._decoder.add_layer(
                layer.attn_norm,
                parts,
                _matrix(layer.o),
                layer.mlp_norm,
                _matrix(layer.gate_up),
                _matrix(layer.down),
                layer.qkv_bias,
                layer.q_norm,
                layer.k_norm,
                layer.attn_post_norm,
                layer.mlp_post_norm,
                layer.window,
                layer.rope,
            )
        self._logits = np.empty((0, shape.vocab_size), np.float32)

    def forward(
        self,
        pool: torch.Tensor,
        token_ids: Ints,
        positions: Ints,
        slot_mapping: Ints,
        block_tables: Ints,
        query_start: Ints,
        context_lens: Ints,
        logit_rows: Ints,
        num_threads: int,
    ) -> Floats:
        """Compute the rows of a step. Mutates `pool` at the rows' slots.

        :param pool: `[num_blocks, kv_heads, layers, 2, block_size, row]`, the last dim contiguous; see
            `kernels.kv_rows`.
        :param token_ids, positions, slot_mapping: `[num_rows]`; the others as in `kernels.ops.paged_attention`.
        :param logit_rows: rows whose logits are wanted, `[num_logits]`.
        :returns: `[num_logits, vocab]`, valid until the next call.
        :raises IndexError: a token, slot, block or row that does not exist; nothing was written.
        """
        if len(logit_rows) > len(self._logits):
            self._logits = np.empty((len(logit_rows), self._vocab), np.float32)
        logits = self._logits[: len(logit_rows)]
        self._decoder.forward(
            _layer_cache(pool),
            pool.stride(2),
            token_ids,
            positions,
            slot_mapping,
            block_tables,
            query_start,
            context_lens,
            logit_rows,
            logits,
            num_threads,
            self._simd,
        )
        return logits


def _matrix(packed: PackedMatrix):
    assert _kernels is not None
    return _kernels.Matrix(int(packed.fmt), packed.num_outputs, packed.num_inputs, packed.data)


def _layer_cache(pool: torch.Tensor):
    assert _kernels is not None
    assert pool.dim() == 6, "pool: [num_blocks, kv_heads, layers, 2, block_size, row]"
    assert pool.stride(5) == 1, "pool: rows contiguous"
    num_blocks, num_kv_heads, _, _, block_size, _ = pool.shape
    block_stride, head_stride, _, kv_stride, token_stride, _ = pool.stride()
    return _kernels.LayerCache(
        pool.data_ptr(),
        CACHE_DTYPES[pool.dtype],
        num_blocks,
        num_kv_heads,
        block_size,
        head_dim_of(pool),
        block_stride,
        head_stride,
        kv_stride,
        token_stride,
    )
