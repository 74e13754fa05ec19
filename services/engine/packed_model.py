"""The decoder on packed weights: a whole step is one call of the C++ kernels."""

import numpy as np
import torch

from kernels.decoder import Decoder, DecoderShape, LayerMatrices, PackedMatrix
from services.engine.checkpoint import Checkpoint
from services.engine.model_spec import ModelSpec, WeightDtype
from services.engine.pack_file import load_packed
from services.engine.packing_plan import Buffer, Entry, PackPlan, plan_pack
from services.engine.step_batch import StepBatch


class PackedModel:
    """Implements `services.engine.model.Model`. Has no state that a step changes, beside scratch."""

    def __init__(self, spec: ModelSpec, plan: PackPlan, buffer: Buffer, *, simd: bool = True) -> None:
        """:param buffer: the plan's packed weights; kept. :param simd: False takes the scalar body."""
        self.spec = spec
        entries = {entry.name: entry for entry in plan.entries}

        def matrix(name: str) -> PackedMatrix:
            entry = entries[name]
            assert entry.fmt is not None
            return PackedMatrix(entry.fmt, entry.num_outputs, entry.num_inputs, _bytes(buffer, entry))

        def vector(name: str) -> np.ndarray:
            return _bytes(buffer, entries[name]).view(np.float32)

        layers = [
            LayerMatrices(
                attn_norm=vector(f"{at}.attn_norm"),
                qkv=tuple(matrix(f"{at}.qkv.{i}") for i in range(3) if f"{at}.qkv.{i}" in entries),
                o=matrix(f"{at}.o"),
                mlp_norm=vector(f"{at}.mlp_norm"),
                gate_up=matrix(f"{at}.gate_up"),
                down=matrix(f"{at}.down"),
            )
            for at in (f"layers.{i}" for i in range(spec.num_layers))
        ]
        shape = DecoderShape(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            rms_eps=spec.rms_eps,
        )
        head = matrix("embed" if spec.tied_embeddings else "head")
        frequencies = inverse_frequencies(spec).numpy()
        self._decoder = Decoder(shape, frequencies, matrix("embed"), layers, vector("norm"), head, simd=simd)

    def forward(self, batch: StepBatch, pool: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
        """See `services.engine.model.Model.forward`."""
        logits = self._decoder.forward(
            pool,
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.block_tables,
            batch.query_start,
            batch.context_lens,
            batch.logit_rows,
            num_threads,
        )
        return torch.from_numpy(logits)


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """RoPE's, float32 `[head_dim / 2]`: computed in float32, as the models were trained."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    return 1.0 / spec.rope_theta**exponents


def load_packed_model(checkpoint: Checkpoint, dtype: WeightDtype, cache_dir: str = "") -> PackedModel:
    """:raises ModelError: damaged, or of unknown types."""
    buffer = load_packed(checkpoint, dtype, cache_dir)
    return PackedModel(checkpoint.spec, plan_pack(checkpoint, dtype), buffer)


def _bytes(buffer: Buffer, entry: Entry) -> Buffer:
    return buffer[entry.offset : entry.offset + entry.num_bytes]
