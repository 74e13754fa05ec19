"""A Llama model in a GGUF file."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.engine.checkpoint import ModelDigest, expected_names
from services.engine.gguf_file import GgufFile
from services.engine.gguf_quants import Groups, bits_of, dequantise, split
from services.engine.model_spec import ModelSpec
from shared.errors import ModelError
from shared.model_path import model_name

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufCheckpoint:
    """See `services.engine.checkpoint.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """:raises ModelError: damaged, an unknown architecture, or tensors missing or unknown."""
        self._file = GgufFile(path)
        self.spec = _read_spec(self._file)
        expected = {_gguf_name(name) for name in expected_names(self.spec.num_layers, self.spec.tied_embeddings)}
        for name in sorted(expected - self._file.tensors.keys()):
            raise ModelError(f"model {path}: tensor {name} is missing")
        for name in sorted(self._file.tensors.keys() - expected):
            raise ModelError(f"model {path}: tensor {name} is not part of a Llama model that this build knows")

    def read(self, name: str) -> torch.Tensor:
        tensor = self._file.tensors[_gguf_name(name)]
        weights = dequantise(self._file.read(tensor), tensor.type_id, tensor.shape)
        order = self._row_order(name, len(weights))
        return torch.from_numpy(weights if order is None else weights[order])

    def bits(self, name: str) -> int:
        return bits_of(self._file.tensors[_gguf_name(name)].type_id)

    def read_groups(self, name: str) -> Groups:
        tensor = self._file.tensors[_gguf_name(name)]
        groups = split(self._file.read(tensor), tensor.type_id, tensor.shape)
        order = self._row_order(name, len(groups.q))
        return groups if order is None else groups.reorder(order)

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
        """GGUF's Llama keeps the two rows that RoPE rotates together side by side; we keep them half a head apart."""
        heads = {"q_proj.weight": self.spec.num_heads, "k_proj.weight": self.spec.num_kv_heads}
        num_heads = next((count for end, count in heads.items() if name.endswith(end)), 0)
        if not num_heads:
            return None
        return np.arange(num_rows).reshape(num_heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.weight"


def _read_spec(file: GgufFile) -> ModelSpec:
    field = _Fields(file)
    architecture = field.text("general.architecture")
    if architecture != "llama":
        raise ModelError(f"model {file.path}: architecture {architecture!r} is not known to this build (llama is)")
    field.refuse("llama.rope.scaling.type", allowed=("none",))
    field.refuse("llama.expert_count", allowed=(0,))
    hidden, heads = field.number("llama.embedding_length"), field.number("llama.attention.head_count")
    head_dim = field.number("llama.attention.key_length", hidden // heads)
    field.refuse("llama.attention.value_length", allowed=(head_dim,))
    field.refuse("llama.rope.dimension_count", allowed=(head_dim,))
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"model {file.path}: tensor token_embd.weight is missing")
    return ModelSpec(
        name=model_name(file.path),
        num_layers=field.number("llama.block_count"),
        hidden_size=hidden,
        intermediate_size=field.number("llama.feed_forward_length"),
        num_heads=heads,
        num_kv_heads=field.number("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        rope_theta=float(file.metadata.get("llama.rope.freq_base", 10_000.0)),
        rms_eps=field.real("llama.attention.layer_norm_rms_epsilon"),
        max_context=field.number("llama.context_length"),
        tied_embeddings="output.weight" not in file.tensors,
        digest=_digest(file),
    )


def _digest(file: GgufFile) -> str:
    digest = ModelDigest()
    tensors = sorted((t.offset, t.num_bytes) for t in file.tensors.values())
    digest.add_file(memoryview(file.data), file.data_start, tensors)
    return digest.hex()


class _Fields:
    """Metadata fields of the right kind, or a ModelError that names the field."""

    def __init__(self, file: GgufFile) -> None:
        self._path, self._metadata = file.path, file.metadata

    def number(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"model {self._path}: field {key} must be a number above 0, not {value!r}")
        return value

    def real(self, key: str) -> float:
        value = self._get(key, None)
        if not isinstance(value, float):
            raise ModelError(f"model {self._path}: field {key} must be a real number, not {value!r}")
        return value

    def text(self, key: str) -> str:
        return str(self._get(key, None))

    def refuse(self, key: str, *, allowed: tuple[Any, ...]) -> None:
        """The field, if it is there, has a value that this build can honour."""
        if key in self._metadata and self._metadata[key] not in allowed:
            raise ModelError(f"model {self._path}: {key} = {self._metadata[key]!r} is not known to this build")

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise ModelError(f"model {self._path}: field {key} is missing")
        return value
