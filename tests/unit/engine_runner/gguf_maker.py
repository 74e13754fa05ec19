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

SHAPES = {
    "token_embd": (VOCAB, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (WIDTH, HIDDEN),
    "blk.0.ffn_up": (WIDTH, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, WIDTH),
}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    drop: str = "",
    extra: str = "",
    fields: dict[str, Any] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    seed: int = 0,
) -> Path:
    """A one-layer Llama. `drop` and `extra` name tensors to leave out and to add, `fields` adds metadata (int, float
    or str), `types` the tensors' types (F32 where none is named)."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (FIELDS | (fields or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * VOCAB)
    for name, shape in SHAPES.items() if not extra else [*SHAPES.items(), (extra, (HIDDEN,))]:
        values = rng.standard_normal(shape).astype(np.float32)
        if name == drop:
            continue
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        data = values if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
