"""The model's tokenizer, from a HF folder or from a GGUF file's metadata."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from shared.errors import ModelError
from shared.gguf_header import read_metadata
from shared.tokenizer import sentencepiece
from shared.tokenizer.detokenizer import ByteLevelPieces, Detokenizer, Pieces, SentencePieces, pieces_for
from shared.tokenizer.pretokenizers import pre_type

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_GGUF_END_TOKENS = ("eos", "eot", "eom")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. Immutable; safe to use from several threads."""

    backend: tokenizers.Tokenizer
    pieces: Pieces
    end_token_ids: tuple[int, ...]  # generation ends with any of them
    template_tokens: dict[str, str]  # bos_token, eos_token, ...: what chat templates may refer to
    chat_template: str | None
    tool_chat_template: str | None = None  # for requests with tools, where the model has one of its own

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def max_token_bytes(self) -> int | None:
        """No text of n UTF-8 bytes has fewer than n / this tokens; None where a normaliser breaks that."""
        if self.backend.normalizer is not None or not isinstance(self.pieces, ByteLevelPieces):
            return None
        vocab = self.backend.get_vocab(with_added_tokens=True)
        return max(len(text.encode()) for text in vocab)  # as long as the bytes it stands for, or longer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Special tokens' text in `text` becomes those tokens, as in vLLM and HF.

        The batch call is used because it alone gives up the GIL.
        """
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(batch[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all the ids."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so; None: there is none."""
        token_id = self.backend.token_to_id(text)
        token = None if token_id is None else self.backend.get_added_tokens_decoder().get(token_id)
        return token_id if token is not None and token.special else None

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental decoder, for one choice."""
        return (self.pieces if skip_special_tokens else self._all_pieces).detokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, UTF-8 or a part of it; a special token's own text."""
        return self._all_pieces.token_bytes(token_id)

    @cached_property
    def _all_pieces(self) -> Pieces:
        return self.pieces.with_special()


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model as `shared.model_path.resolve` gives it.

    :raises ModelError: files are missing or damaged, or of a kind that this build does not know.
    """
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


# --- GGUF ------------------------------------------------------------------------------------------


def _from_gguf(path: Path) -> Tokenizer:
    meta = {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value
        for key, value in read_metadata(path).items()
        if key.startswith("tokenizer.")
    }
    try:
        return _gguf_tokenizer(path, meta)
    except KeyError as exc:
        raise ModelError(f"model {path}: the GGUF metadata lacks tokenizer.ggml.{exc.args[0]}") from None
    except (TypeError, ValueError, IndexError) as exc:
        raise ModelError(f"model {path}: the GGUF metadata's tokenizer is damaged: {exc}") from None


def _gguf_tokenizer(path: Path, meta: dict[str, Any]) -> Tokenizer:
    if meta["model"] == "llama":
        backend, strip = sentencepiece.build(meta)
        _surround(backend, meta, add_bos="bos_token_id" in meta)
        pieces: Pieces = SentencePieces(backend, strip=strip)
    elif meta["model"] == "gpt2":
        backend = _byte_level_bpe(path, meta)
        pieces = ByteLevelPieces(backend)
    else:
        known = "byte-level BPE (gpt2) and SentencePiece BPE (llama) are"
        raise ModelError(f"model {path}: tokenizer type {meta['model']!r} is not supported in GGUF; {known}")
    tokens: list[str] = meta["tokens"]
    named = {
        name: tokens[token_id]
        for name in ("bos", "eos", "unknown", "padding")
        if 0 <= (token_id := meta.get(f"{name}_token_id", -1)) < len(tokens)
    }
    named = {{"unknown": "unk", "padding": "pad"}.get(k, k): v for k, v in named.items()}
    ends = [meta[key] for kind in _GGUF_END_TOKENS if (key := f"{kind}_token_id") in meta]
    return Tokenizer(
        backend=backend,
        pieces=pieces,
        end_token_ids=tuple(dict.fromkeys(ends)),
        template_tokens={f"{name}_token": text for name, text in named.items()},
        chat_template=meta.get("chat_template"),
        tool_chat_template=meta.get("chat_template.tool_use"),
    )


def _byte_level_bpe(path: Path, meta: dict[str, Any]) -> tokenizers.Tokenizer:
    pre = pre_type(meta.get("pre", "default"))
    if pre is None:
        raise ModelError(f"model {path}: pre-tokenizer {meta['pre']!r} is not supported")
    tokens: list[str] = meta["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["merges"]]
    vocab = {text: i for i, text in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)  # pyright: ignore[reportArgumentType]
    except Exception as exc:  # the library raises bare Exception: a merge of unknown tokens, a bad pair
        raise ModelError(f"model {path}: the tokenizer's merges are damaged: {exc}") from None
    backend = tokenizers.Tokenizer(bpe)
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre.pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds: list[int] = meta.get("token_type", [])
    added = [(text, kind) for text, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    for text, kind in added:
        token = AddedToken(text, normalized=False, special=kind == _CONTROL)
        (backend.add_special_tokens if kind == _CONTROL else backend.add_tokens)([token])
    _surround(backend, meta, add_bos=pre.add_bos)
    return backend


def _surround(backend: tokenizers.Tokenizer, meta: dict[str, Any], *, add_bos: bool) -> None:
    """Put BOS before and EOS after encoded text where the file asks for it. Mutates `backend`."""
    before = meta["bos_token_id"] if meta.get("add_bos_token", add_bos and "bos_token_id" in meta) else None
    after = meta["eos_token_id"] if meta.get("add_eos_token", False) else None
    names = {i: backend.id_to_token(i) or "" for i in (before, after) if i is not None}
    if not names:
        return
    first = [] if before is None else [names[before]]
    last = [] if after is None else [names[after]]
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=[*first, "$A", *last], pair=None, special_tokens=[(name, i) for i, name in names.items()]
    )


# --- HF folder -------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"model {folder}: there is no tokenizer.json")
    text = file.read_text(encoding="utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as exc:  # the library raises bare Exception
        raise ModelError(f"model {folder}: tokenizer.json cannot be read: {exc}") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    named = {name: token for name in _TEMPLATE_TOKENS if (token := _token_text(config.get(name)))}
    templates = _chat_templates(folder, config)
    return Tokenizer(
        backend=backend,
        pieces=pieces_for(backend, json.loads(text).get("decoder"), where=str(file)),
        end_token_ids=_end_tokens(folder, backend, named),
        template_tokens=named,
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
    )


def _end_tokens(folder: Path, backend: tokenizers.Tokenizer, named: dict[str, str]) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the tokenizer's EOS."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    token_id = backend.token_to_id(named.get("eos_token", ""))
    return () if token_id is None else (token_id,)


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name: the file, else what the configuration has, one (`default`) or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found = config.get("chat_template")
    if isinstance(found, list):
        return {t["name"]: t["template"] for t in found if isinstance(t, dict) and "name" in t and "template" in t}
    return {"default": found} if isinstance(found, str) else {}


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is its text, or an object around it."""
    return value.get("content") if isinstance(value, dict) else value


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ModelError(f"model {file}: not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ModelError(f"model {file}: not a JSON object")
    return value
