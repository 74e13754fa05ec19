"""Small GGUF files, written with the `gguf` package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType

HIDDEN, WIDTH, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 40

FIELDS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
}


def shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Of each tensor, for this width of the residual."""
    return {
        "token_embd": (VOCAB, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (WIDTH, hidden),
        "blk.0.ffn_up": (WIDTH, hidden),
        "blk.0.ffn_down": (hidden, WIDTH),
    }


_HALVES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 12: (0, 2), 13: (0, 2), 14: (208,)}
"""Where each type's groups keep their float16 fields."""


def random_groups(type_id: int, count: int, seed: int = 1, size: float = 1.0) -> np.ndarray:
    """So many groups of a quantised type, uint8 `[count, group_bytes]`: any bits, but scales near `size`."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[Q(type_id)][1]), dtype=np.uint8)
    for first in _HALVES[type_id]:
        raw[:, first : first + 2] = (size * rng.standard_normal((count, 1))).astype(np.float16).view(np.uint8)
    return raw


def _random_matrix(shape: tuple[int, ...], type_id: int, seed: int) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Random groups that make weights of about 1 over the root of the inputs."""
    raw = random_groups(type_id, shape[0] * shape[1] // 256, seed, size=0.002 / shape[1] ** 0.5)
    return raw.reshape(shape[0], -1), Q(type_id)


def _stored(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantised, or zeros in a type that the package cannot write."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        group, group_bytes = gguf.GGML_QUANT_SIZES[kind]
        return np.zeros((len(values), values.shape[1] // group * group_bytes), np.uint8)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    drop: str = "",
    extra: str = "",
    fields: dict[str, Any] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    k_quants: dict[str, int] | None = None,
    hidden: int = HIDDEN,
    seed: int = 0,
) -> Path:
    """A one-layer Llama. `drop` and `extra` name tensors to leave out and to add, `fields` adds metadata (int, float
    or str), `types` the tensors' types (F32 where none is named), `k_quants` those that
    the package cannot write: random groups."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"embedding_length": hidden}
    for key, value in (FIELDS | sizes | (fields or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * VOCAB)
    tensors = shapes(hidden)
    for name, shape in tensors.items() if not extra else [*tensors.items(), (extra, (hidden,))]:
        values = rng.standard_normal(shape).astype(np.float32)
        if name == drop:
            continue
        if name in (k_quants or {}):
            raw, kind = _random_matrix(shape, (k_quants or {})[name], seed)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
            continue
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        data = values if kind == gguf.GGMLQuantizationType.F32 else _stored(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
