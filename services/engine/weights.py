"""A model's weights in memory: float32, with projections of the same input joined into one matrix."""

from dataclasses import dataclass

import torch

from services.engine.checkpoint import Checkpoint, check_shape
from services.engine.model_spec import tensor_shapes


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What is None the model does not have."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: torch.Tensor  # [hidden, heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    qkv_bias: torch.Tensor | None = None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None
    attn_post_norm: torch.Tensor | None = None  # [hidden]
    mlp_post_norm: torch.Tensor | None = None


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
    reader = _Reader(checkpoint)
    embed = reader.read("embed")
    return ModelWeights(
        embed=embed,
        layers=tuple(_load_layer(reader, f"layers.{i}.") for i in range(spec.num_layers)),
        norm=reader.read("norm"),
        lm_head=embed if spec.tied_embeddings else reader.read("head"),
    )


class _Reader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._shapes = checkpoint, tensor_shapes(checkpoint.spec)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.read(name)
        check_shape(self._checkpoint.spec, self._checkpoint.label(name), tuple(tensor.shape), self._shapes[name])
        return tensor.contiguous()

    def maybe(self, name: str) -> torch.Tensor | None:
        return self.read(name) if name in self._shapes else None

    def joined(self, *names: str) -> torch.Tensor:
        return torch.cat([self.read(name) for name in names])


def _load_layer(reader: _Reader, at: str) -> LayerWeights:
    biases = [reader.maybe(at + f"{part}_bias") for part in "qkv"]
    return LayerWeights(
        attn_norm=reader.read(at + "attn_norm"),
        qkv=reader.joined(at + "q", at + "k", at + "v"),
        o=reader.read(at + "o"),
        mlp_norm=reader.read(at + "mlp_norm"),
        gate_up=reader.joined(at + "gate", at + "up"),
        down=reader.read(at + "down"),
        qkv_bias=torch.cat([bias for bias in biases if bias is not None]) if biases[0] is not None else None,
        q_norm=reader.maybe(at + "q_norm"),
        k_norm=reader.maybe(at + "k_norm"),
        attn_post_norm=reader.maybe(at + "attn_post_norm"),
        mlp_post_norm=reader.maybe(at + "mlp_post_norm"),
    )
