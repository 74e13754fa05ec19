"""What a model and its KV cache look like: plain numbers, no tensors."""

from dataclasses import dataclass
from math import prod
from typing import Literal

KVDtype = Literal["float32", "float16", "bfloat16", "int8", "fp8"]
"""`int8` and `fp8` (e4m3) with a float32 scale per token, head and K or V."""

WeightDtype = Literal["auto", "int8", "float32"]
"""`auto`: 4- and 8-bit weights as stored and all others in 8 bits, in groups of 32; `int8`: all in 8 bits, one scale
per output; both with activations in 8 bits. `float32`: exact."""

DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES: dict[KVDtype, int] = {"int8": 4, "fp8": 4}

LAYOUT = "block-major-1"
"""`[num_blocks, num_kv_heads, num_layers, 2, block_size, row]`: one block is one contiguous run. A row is `head_dim`
numbers, and behind 8-bit ones their scale."""

NUMERICS_VERSION = 3
"""Raised when this build computes other KV values than the one before from the same weights and tokens."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation by position (Su et al. 2021): row p turns pair i by the angle `p * inverse_frequencies[i]`."""

    inverse_frequencies: tuple[float, ...]  # [head_dim / 2], each a float32
    scale: float = 1.0  # of cosines and sines (YaRN)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How one layer attends."""

    window: int = 0  # a row sees the last so many tokens, itself included; 0: all
    rope: int = 0  # which of the model's; -1: none


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: RMS norms before attention and a gated MLP, grouped heads, RoPE. What Llama (Touvron et al. 2023) does
    not have is off by default."""

    name: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    ropes: tuple[Rope, ...]
    rms_eps: float
    max_context: int  # tokens
    tied_embeddings: bool  # the LM head is the embedding
    digest: str  # hex; see `services.engine.checkpoint`
    attention_scale: float  # of q k^T
    activation: Literal["silu", "gelu"] = "silu"  # gelu: its tanh form
    qkv_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head, before RoPE
    post_norms: bool = False  # RMS norm of what attention and MLP add to the residual
    embed_scale: float = 1.0
    attention_softcap: float = 0.0  # x becomes cap * tanh(x / cap); 0: it stays
    logit_softcap: float = 0.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory, float32."""
        return 4 * sum(prod(shape) for shape in tensor_shapes(self).values())

    def workspace_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """What one step may take beside weights and pool: activations of its rows, logits of its samples."""
        row = 6 * self.hidden_size + 3 * self.intermediate_size + 3 * self.num_heads * self.head_dim
        return 4 * (row * max_num_batched_tokens + 4 * self.vocab_size * max_num_seqs)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight of the model by its name in this project, with its shape. `services.engine.checkpoint` says how
    files call them."""
    hidden, width, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    if spec.qkv_bias:
        layer |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if spec.qk_norm:
        layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.post_norms:
        layer |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "norm": (hidden,)}
    if not spec.tied_embeddings:
        shapes["head"] = (vocab, hidden)
    for i in range(spec.num_layers):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    return shapes


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    kind: Literal["gqa"] = "gqa"
    window: int = 0  # tokens that are ever read again; 0: all. All are kept for now

    @property
    def scale_bytes(self) -> int:
        """Per token, head and K or V."""
        return _SCALE_BYTES.get(self.dtype, 0)

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a block holds, layer by layer."""

    layers: tuple[LayerKV, ...]
    block_size: int  # tokens

    @property
    def token_bytes(self) -> int:
        return sum(layer.token_bytes for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes


def kv_spec(model: ModelSpec, block_size: int, dtype: KVDtype) -> KVSpec:
    """What the model keeps, layer by layer."""
    layers = (LayerKV(model.num_kv_heads, model.head_dim, dtype, window=layer.window) for layer in model.layers)
    return KVSpec(tuple(layers), block_size)


def pool_fingerprint(model: ModelSpec, kv: KVSpec, dtype: WeightDtype) -> str:
    """Equal for two pools exactly if a block of one may be copied into the other and used there.

    :param dtype: in which the KV was computed.
    """
    dtypes = "+".join(sorted({layer.dtype for layer in kv.layers}))
    scales = "+".join(sorted({str(layer.scale_bytes) for layer in kv.layers}))
    return f"{model.digest}/w-{dtype}/{dtypes}/s{scales}/{LAYOUT}/b{kv.block_size}/n{NUMERICS_VERSION}"
