"""What a model is to the runner, and the plain one: torch, op by op, float32.

The plain one runs where the C++ kernels were not built, and is what the packed one is compared with. Its linear layers
are torch's: a row's last bits depend on how many rows share the step, so two schedules may differ by rounding,
never more. The packed model (`services.engine.packed_model`) gives a row the same bits in any company.
"""

from typing import Protocol

import torch
from torch.nn.functional import embedding, linear

from kernels import ops
from services.engine.model_spec import LayerSpec, ModelSpec
from services.engine.step_batch import StepBatch
from services.engine.weights import LayerWeights, ModelWeights

Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [num_rows, head_dim / 2]


class Model(Protocol):
    """Weights and arithmetic of a decoder."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, batch: StepBatch, pool: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
        """Compute the batch's rows. Mutates `pool` at the batch's slots.

        :param pool: `[num_blocks, kv_heads, layers, 2, block_size, row]`, see `kernels.kv_rows`.
        :returns: logits of `batch.logit_rows`, float32 `[num_samples, vocab]`, valid until the next call.
        """
        ...


class PlainModel:
    """Implements `Model`. Has no state that a step changes."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self.spec, self._weights = spec, weights
        self._ropes = [(torch.tensor(rope.inverse_frequencies), rope.scale) for rope in spec.ropes]

    def forward(self, batch: StepBatch, pool: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
        """See `Model.forward`."""
        spec, weights = self.spec, self._weights
        positions = torch.from_numpy(batch.positions)[:, None].float()
        turns = [_turns(positions * frequencies, scale) for frequencies, scale in self._ropes]
        x = embedding(torch.from_numpy(batch.token_ids), weights.embed) * spec.embed_scale
        for i, (layer, kind) in enumerate(zip(weights.layers, spec.layers, strict=True)):
            turn = turns[kind.rope] if kind.rope >= 0 else None
            attended = self._attend(layer, kind, x, turn, batch, pool[:, :, i], num_threads)
            self._add(x, linear(attended, layer.o), layer.attn_post_norm)
            self._add(x, self._mlp(layer, x), layer.mlp_post_norm)
        if not len(batch.logit_rows):  # chunks that are not the last sample nothing
            return torch.empty(0, self.spec.vocab_size)
        logits = linear(self._norm(x[torch.from_numpy(batch.logit_rows)], weights.norm), weights.lm_head)
        cap = spec.logit_softcap
        return cap * (logits / cap).tanh() if cap else logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, self.spec.rms_eps)
        return out

    def _add(self, x: torch.Tensor, branch: torch.Tensor, post_norm: torch.Tensor | None) -> None:
        """Add to the residual, normalised first where the model has such a norm. Mutates `x`."""
        x += branch if post_norm is None else self._norm(branch, post_norm)

    def _attend(
        self,
        layer: LayerWeights,
        kind: LayerSpec,
        x: torch.Tensor,
        turn: Turns | None,
        batch: StepBatch,
        cache: torch.Tensor,
        num_threads: int,
    ) -> torch.Tensor:
        """Norm, projections, RoPE, store, attention: [num_rows, heads * head_dim]."""
        spec = self.spec
        qkv = linear(self._norm(x, layer.attn_norm), layer.qkv, layer.qkv_bias).view(len(x), -1, spec.head_dim)
        keys_end = spec.num_heads + spec.num_kv_heads
        q, k = qkv[:, : spec.num_heads], qkv[:, spec.num_heads : keys_end]
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(self._norm(q.contiguous(), layer.q_norm))
            k.copy_(self._norm(k.contiguous(), layer.k_norm))
        if turn is not None:
            ops.rope(qkv[:, :keys_end], *turn)
        ops.store_kv(k, qkv[:, keys_end:], cache, torch.from_numpy(batch.slot_mapping))
        out = torch.empty(q.shape)
        ops.paged_attention(
            out,
            q,
            cache,
            torch.from_numpy(batch.block_tables),
            torch.from_numpy(batch.query_start),
            torch.from_numpy(batch.context_lens),
            spec.attention_scale,
            num_threads,
            window=kind.window,
            softcap=spec.attention_softcap,
        )
        return out.view(len(x), -1)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gated = torch.empty(len(x), self.spec.intermediate_size)
        gate = ops.gelu_mul if self.spec.activation == "gelu" else ops.silu_mul
        gate(gated, linear(self._norm(x, layer.mlp_norm), layer.gate_up))
        return linear(gated, layer.down)


def _turns(angles: torch.Tensor, scale: float) -> Turns:
    return angles.cos() * scale, angles.sin() * scale
