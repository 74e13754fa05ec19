"""A Llama model in Hugging Face's form: a folder with `config.json` and safetensors, one file or shards."""

import json
import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.engine.checkpoint import ModelDigest, expected_names
from services.engine.gguf_quants import Groups
from services.engine.model_spec import ModelSpec
from shared.errors import ModelError
from shared.model_path import model_name

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class HFCheckpoint:
    """See `services.engine.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        """:raises ModelError: damaged, an unknown architecture, or tensors missing or unknown."""
        self._folder = folder
        config = _read_json(folder / "config.json")
        files = _weight_files(folder)
        self._owner = {name: file for file in files for name in _tensor_names(file)}
        digest = ModelDigest()
        digest.add((folder / "config.json").read_bytes())
        for file in files:
            _add_to_digest(digest, file)
        self.spec = _read_spec(folder, config, digest.hex())
        self._check_names()

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._owner[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"model {self._folder}: tensor {name} has type {tensor.dtype}, which is not known")
        return tensor.float()

    def bits(self, name: str) -> int:
        return 0

    def read_groups(self, name: str) -> Groups:
        raise AssertionError(f"{name} is not stored in groups")

    def _check_names(self) -> None:
        expected = set(expected_names(self.spec.num_layers, self.spec.tied_embeddings))
        for name in sorted(expected - self._owner.keys()):
            raise ModelError(f"model {self._folder}: tensor {name} is missing")
        # Older exports repeat the tied head, or keep RoPE's frequencies, which follow from the config.
        harmless = {n for n in self._owner if n.endswith("rotary_emb.inv_freq")} | {"lm_head.weight"}
        for name in sorted(self._owner.keys() - expected - harmless):
            raise ModelError(f"model {self._folder}: tensor {name} is not part of a Llama model that this build knows")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ModelError(f"model file {path}: {exc}") from None
    if not isinstance(value, dict):
        raise ModelError(f"model file {path}: not a JSON object")
    return value


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, in order of name; shards as the index lists them."""
    index = folder / "model.safetensors.index.json"
    shards = set(_read_json(index).get("weight_map", {}).values()) if index.is_file() else {"model.safetensors"}
    names = sorted(shards)
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"model {folder}: file {name} is missing")
    return [folder / name for name in names]


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as exc:
        raise ModelError(f"model file {file}: {exc}") from None


def _add_to_digest(digest: ModelDigest, file: Path) -> None:
    """Format: https://github.com/huggingface/safetensors: u64 header size, JSON header, data."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with memoryview(mapped) as data:
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(bytes(data[8:start]))
            offsets = sorted(info["data_offsets"] for name, info in header.items() if name != "__metadata__")
            digest.add_file(data, start, [(start + first, end - first) for first, end in offsets])


def _read_spec(folder: Path, config: dict[str, Any], digest: str) -> ModelSpec:
    kind = config.get("model_type")
    if kind != "llama":
        raise ModelError(f"model {folder}: architecture {kind!r} is not known to this build (llama is)")
    for key, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, allowed) != allowed:
            raise ModelError(f"model {folder}: {key} = {config[key]!r} is not known to this build")
    hidden, heads = _number(folder, config, "hidden_size"), _number(folder, config, "num_attention_heads")
    return ModelSpec(
        name=model_name(folder),
        num_layers=_number(folder, config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_number(folder, config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_number(folder, config, "num_key_value_heads", heads),
        head_dim=_number(folder, config, "head_dim", hidden // heads),
        vocab_size=_number(folder, config, "vocab_size"),
        rope_theta=_rope_theta(folder, config),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_context=_number(folder, config, "max_position_embeddings", 2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        digest=digest,
    )


def _rope_theta(folder: Path, config: dict[str, Any]) -> float:
    """The base of RoPE, from the newer `rope_parameters` or the older top-level fields."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"model {folder}: RoPE scaling {kind!r} is not known to this build")
    return float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))


def _number(folder: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"model {folder}: config.json field {key} must be a number above 0, not {value!r}")
    return value
