"""A model's weights in memory: float32, with projections of the same input joined into one matrix."""

from dataclasses import dataclass

import torch

from services.engine.checkpoint import Checkpoint
from services.engine.model_spec import ModelSpec
from shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: torch.Tensor  # [hidden, heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the same tensor as `embed` where tied


def load_weights(checkpoint: Checkpoint) -> ModelWeights:
    """Read every tensor once.

    :raises ModelError: a tensor is missing, of an unknown type, or of another shape than the spec says.
    """
    spec = checkpoint.spec
    embed = _read(checkpoint, "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    tied = spec.tied_embeddings
    lm_head = embed if tied else _read(checkpoint, "lm_head.weight", (spec.vocab_size, spec.hidden_size))
    norm = _read(checkpoint, "model.norm.weight", (spec.hidden_size,))
    return ModelWeights(embed, tuple(_load_layer(checkpoint, i, spec) for i in range(spec.num_layers)), norm, lm_head)


def _load_layer(checkpoint: Checkpoint, layer: int, spec: ModelSpec) -> LayerWeights:
    hidden, width = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def read(part: str, *shape: int) -> torch.Tensor:
        return _read(checkpoint, f"model.layers.{layer}.{part}.weight", shape)

    q, k, v = (
        read(f"self_attn.{part}_proj", rows, hidden) for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    )
    return LayerWeights(
        attn_norm=read("input_layernorm", hidden),
        qkv=torch.cat([q, k, v]),
        o=read("self_attn.o_proj", hidden, q_rows),
        mlp_norm=read("post_attention_layernorm", hidden),
        gate_up=torch.cat([read("mlp.gate_proj", width, hidden), read("mlp.up_proj", width, hidden)]),
        down=read("mlp.down_proj", hidden, width),
    )


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = checkpoint.read(name)
    if tuple(tensor.shape) != shape:
        raise ModelError(f"model {checkpoint.spec.name}: tensor {name} is {tuple(tensor.shape)}, expected {shape}")
    return tensor.contiguous()
