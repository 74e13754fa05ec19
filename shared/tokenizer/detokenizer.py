"""Token ids back to text, a token at a time, never a part of a character.

The pieces of a choice, joined, are exactly what the tokenizer gives for all its ids at once. Nothing is ever
decoded twice, so a token costs the same at any place.
"""

import codecs
import re
from typing import Any, Protocol

import tokenizers

from shared.errors import ModelError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The decoder of one choice."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; "" where a character is not yet whole."""
        ...

    def flush(self) -> str:
        """At the end: what was held back; bytes that make no character become U+FFFD."""
        ...


class Pieces(Protocol):
    """What every token stands for, shared by all choices."""

    def detokenizer(self) -> Detokenizer: ...

    def with_special(self) -> "Pieces":
        """The same, but special tokens stand for their own text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, UTF-8 or a part of it."""
        ...


def pieces_for(backend: tokenizers.Tokenizer, decoder: Any, *, where: str) -> Pieces:
    """The pieces for a tokenizer.json's `decoder` object.

    :raises ModelError: a decoder that this build does not know.
    """
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return ByteLevelPieces(backend)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        return SentencePieces(backend, strip=steps[3]["start"] if kinds[3:] else 0)
    raise ModelError(f"{where}: token decoder {kinds or decoder!r} is not supported")


class _Table:
    """Token id to text; None for special tokens and ids that the tokenizer has no token for."""

    def __init__(self, backend: tokenizers.Tokenizer, *, special: bool) -> None:
        self._backend = backend
        added = {} if special else backend.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}

    def text(self, token_id: int) -> str | None:
        return None if token_id in self._special else self._backend.id_to_token(token_id)


# --- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) ---------------------------------------------------


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class ByteLevelPieces:
    """Tokens are bytes, written in GPT-2's alphabet; an added token may be plain text instead."""

    def __init__(self, backend: tokenizers.Tokenizer, *, special: bool = False) -> None:
        self._backend, self._table = backend, _Table(backend, special=special)
        self._known: dict[int, bytes] = {}

    def with_special(self) -> Pieces:
        return ByteLevelPieces(self._backend, special=True)

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes_of(token_id)

    def detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer(self)

    def bytes_of(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        text = self._table.text(token_id) or ""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in text)
        except KeyError:
            return text.encode()


class _ByteDetokenizer:
    def __init__(self, pieces: ByteLevelPieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._pieces.bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


# --- SentencePiece with byte fallback (Llama 2, Mistral, Gemma) --------------------------------------

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SentencePieces:
    """Tokens are text with U+2581 for a space; characters out of the vocabulary are runs of byte tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, *, strip: int, special: bool = False) -> None:
        self._backend, self._table = backend, _Table(backend, special=special)
        self._strip = strip
        self._known: dict[int, str | int | None] = {}

    def detokenizer(self) -> Detokenizer:
        return _SentenceDetokenizer(self, self._strip)

    def with_special(self) -> Pieces:
        return SentencePieces(self._backend, strip=self._strip, special=True)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece_of(token_id)
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    def piece_of(self, token_id: int) -> str | int | None:
        """Text, or the value of a byte token, or None where there is nothing to show."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> str | int | None:
        text = self._table.text(token_id)
        if text is None:
            return None
        byte = _BYTE_TOKEN.fullmatch(text)
        return int(byte[1], 16) if byte else text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")


class _SentenceDetokenizer:
    """Holds a run of byte tokens back until it ends: the library decides on the run as a whole."""

    def __init__(self, pieces: SentencePieces, strip: int) -> None:
        self._pieces = pieces
        self._strip = strip  # leading spaces still to be dropped
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        piece = self._pieces.piece_of(token_id)
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._stripped(self._end_run() + piece)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
