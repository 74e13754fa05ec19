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

        def maybe(name: str) -> np.ndarray | None:
            return _bytes(buffer, entries[name]).view(np.float32) if name in entries else None

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
                qkv_bias=maybe(f"{at}.qkv_bias"),
                q_norm=maybe(f"{at}.q_norm"),
                k_norm=maybe(f"{at}.k_norm"),
                attn_post_norm=maybe(f"{at}.attn_post_norm"),
                mlp_post_norm=maybe(f"{at}.mlp_post_norm"),
                window=layer.window,
                rope=layer.rope,
            )
            for at, layer in ((f"layers.{i}", layer) for i, layer in enumerate(spec.layers))
        ]
        head = matrix("embed" if spec.tied_embeddings else "head")
        frequencies = np.array([rope.inverse_frequencies for rope in spec.ropes], np.float32)
        scales = np.array([rope.scale for rope in spec.ropes], np.float32)
        self._decoder = Decoder(
            _shape(spec), frequencies, scales, matrix("embed"), layers, vector("norm"), head, simd=simd
        )

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


def _shape(spec: ModelSpec) -> DecoderShape:
    return DecoderShape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rms_eps=spec.rms_eps,
        attention_scale=spec.attention_scale,
        embed_scale=spec.embed_scale,
        attention_softcap=spec.attention_softcap,
        logit_softcap=spec.logit_softcap,
        gelu=spec.activation == "gelu",
    )


def load_packed_model(checkpoint: Checkpoint, dtype: WeightDtype, cache_dir: str = "") -> PackedModel:
    """:raises ModelError: damaged, or of unknown types."""
    buffer = load_packed(checkpoint, dtype, cache_dir)
    return PackedModel(checkpoint.spec, plan_pack(checkpoint, dtype), buffer)


def _bytes(buffer: Buffer, entry: Entry) -> Buffer:
    return buffer[entry.offset : entry.offset + entry.num_bytes]
