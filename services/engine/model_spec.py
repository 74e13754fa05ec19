"""What a model and its KV cache look like: plain numbers, no tensors."""

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["float32", "float16", "bfloat16"]

WeightDtype = Literal["auto", "float32"]
"""`auto`: 4- and 8-bit weights as stored and all others in 8 bits, activations in 8 bits; `float32`: exact."""

DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

LAYOUT = "block-major-1"
"""`[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`: one block is one contiguous run."""

NUMERICS_VERSION = 2
"""Raised when this build computes other KV values than the one before from the same weights and tokens."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family (Touvron et al. 2023): pre-norm, RoPE, grouped heads, SwiGLU."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_eps: float
    max_context: int  # tokens
    tied_embeddings: bool  # the LM head is the embedding
    digest: str  # hex; see `services.engine.checkpoint`

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory, float32."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return 4 * (self.num_layers * layer + embeddings + self.hidden_size)

    def workspace_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """What one step may take beside weights and pool: activations of its rows, logits of its samples."""
        row = 6 * self.hidden_size + 3 * self.intermediate_size + 3 * self.num_heads * self.head_dim
        return 4 * (row * max_num_batched_tokens + 4 * self.vocab_size * max_num_seqs)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    kind: Literal["gqa"] = "gqa"
    scale_bytes: int = 0  # per token, head and K or V

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a block holds, layer by layer."""

    layers: tuple[LayerKV, ...]
    block_size: int  # tokens

    @property
    def block_bytes(self) -> int:
        return self.block_size * sum(layer.token_bytes for layer in self.layers)


def kv_spec(model: ModelSpec, block_size: int, dtype: KVDtype) -> KVSpec:
    """Every layer alike, as in all models of today's one architecture."""
    return KVSpec((LayerKV(model.num_kv_heads, model.head_dim, dtype),) * model.num_layers, block_size)


def pool_fingerprint(model: ModelSpec, kv: KVSpec, dtype: WeightDtype) -> str:
    """Equal for two pools exactly if a block of one may be copied into the other and used there.

    :param dtype: in which the KV was computed.
    """
    dtypes = "+".join(sorted({layer.dtype for layer in kv.layers}))
    scales = "+".join(sorted({str(layer.scale_bytes) for layer in kv.layers}))
    return f"{model.digest}/w-{dtype}/{dtypes}/s{scales}/{LAYOUT}/b{kv.block_size}/n{NUMERICS_VERSION}"
