"""A model in Hugging Face's form: a folder with `config.json` and safetensors, one file or shards."""

import json
import mmap
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.engine.checkpoint import ModelDigest, check_names
from services.engine.gguf_quants import Groups
from services.engine.hf_config import GEMMAS, read_json, read_spec
from services.engine.model_spec import ModelSpec
from shared.errors import ModelError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_PARTS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_PARTS_WITH_POST_NORMS = _PARTS | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


class HFCheckpoint:
    """See `services.engine.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        """:raises ModelError: damaged, an unknown architecture, or tensors missing or unknown."""
        self._folder = folder
        kind = read_json(folder / "config.json").get("model_type")
        self._norms_from_one = kind in GEMMAS  # they keep a norm's distance from 1
        self.spec: ModelSpec = read_spec(folder, "")  # what is unknown is refused before the files are read
        files = _weight_files(folder)
        self._owner = {name: file for file in files for name in _tensor_names(file)}
        digest = ModelDigest()
        digest.add((folder / "config.json").read_bytes())
        for file in files:
            _add_to_digest(digest, file)
        self.spec = read_spec(folder, digest.hex())
        # Older exports repeat the tied head, or keep RoPE's frequencies, which follow from the config.
        harmless = {name for name in self._owner if name.endswith("rotary_emb.inv_freq")} | {"lm_head.weight"}
        check_names(self.spec, self._owner, self.label, harmless)

    def label(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        _, layer, part = name.split(".")
        parts = _PARTS_WITH_POST_NORMS if self.spec.post_norms else _PARTS
        return f"model.layers.{layer}.{parts[part]}"

    def read(self, name: str) -> torch.Tensor:
        label = self.label(name)
        with safe_open(self._owner[label], framework="pt") as file:
            tensor = file.get_tensor(label)
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"model {self._folder}: tensor {label} has type {tensor.dtype}, which is not known")
        return tensor.float() + 1 if self._norms_from_one and name.endswith("norm") else tensor.float()

    def bits(self, name: str) -> int:
        return 0

    def read_groups(self, name: str) -> Groups:
        raise AssertionError(f"{name} is not stored in groups")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, in order of name; shards as the index lists them."""
    index = folder / "model.safetensors.index.json"
    shards = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else {"model.safetensors"}
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
