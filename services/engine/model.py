"""What a model is to the runner, and the plain one: torch, op by op, float32.

The plain one runs where the C++ kernels were not built, and is what the packed one is compared with. Its linear layers
are torch's: a row's last bits depend on how many rows share the step, so two schedules may differ by rounding,
never more. The packed model (`services.engine.packed_model`) gives a row the same bits in any company.
"""

from typing import Protocol

import torch
from torch.nn.functional import embedding, linear

from kernels import ops
from services.engine.model_spec import ModelSpec
from services.engine.step_batch import StepBatch
from services.engine.weights import LayerWeights, ModelWeights


class Model(Protocol):
    """Weights and arithmetic of a decoder."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, batch: StepBatch, pool: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
        """Compute the batch's rows. Mutates `pool` at the batch's slots.

        :param pool: `[num_blocks, kv_heads, layers, 2, block_size, head_dim]`.
        :returns: logits of `batch.logit_rows`, float32 `[num_samples, vocab]`, valid until the next call.
        """
        ...


class LlamaModel:
    """Implements `Model`. Has no state that a step changes."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self.spec, self._weights = spec, weights
        # In float32, as the models were trained and as other implementations compute it.
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        self._inverse_frequencies = 1.0 / spec.rope_theta**exponents  # [head_dim / 2]

    def forward(self, batch: StepBatch, pool: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
        """See `Model.forward`."""
        spec, weights = self.spec, self._weights
        angles = torch.from_numpy(batch.positions)[:, None].float() * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        x = embedding(torch.from_numpy(batch.token_ids), weights.embed)
        for i, layer in enumerate(weights.layers):
            attended = self._attend(layer, x, cos, sin, batch, pool[:, :, i], num_threads)
            x += linear(attended, layer.o)
            x += self._mlp(layer, x)
        if not len(batch.logit_rows):  # chunks that are not the last sample nothing
            return torch.empty(0, self.spec.vocab_size)
        last = x[torch.from_numpy(batch.logit_rows)]
        normed = torch.empty_like(last)
        ops.rms_norm(normed, last, weights.norm, spec.rms_eps)
        return linear(normed, weights.lm_head)

    def _attend(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: StepBatch,
        cache: torch.Tensor,
        num_threads: int,
    ) -> torch.Tensor:
        """Norm, projections, RoPE, store, attention: [num_rows, heads * head_dim]."""
        spec = self.spec
        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, layer.attn_norm, spec.rms_eps)
        qkv = linear(normed, layer.qkv).view(len(x), -1, spec.head_dim)
        keys_end = spec.num_heads + spec.num_kv_heads
        ops.rope(qkv[:, :keys_end], cos, sin)
        q = qkv[:, : spec.num_heads]
        ops.store_kv(qkv[:, spec.num_heads : keys_end], qkv[:, keys_end:], cache, torch.from_numpy(batch.slot_mapping))
        out = torch.empty(q.shape)
        ops.paged_attention(
            out,
            q,
            cache,
            torch.from_numpy(batch.block_tables),
            torch.from_numpy(batch.query_start),
            torch.from_numpy(batch.context_lens),
            spec.head_dim**-0.5,
            num_threads,
        )
        return out.view(len(x), -1)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, layer.mlp_norm, self.spec.rms_eps)
        gated = torch.empty(len(x), self.spec.intermediate_size)
        ops.silu_mul(gated, linear(normed, layer.gate_up))
        return linear(gated, layer.down)
