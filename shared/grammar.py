"""Structured output: which tokens a grammar allows next. The one home of llguidance.

A grammar travels as llguidance's own text (JSON or Lark; https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
What it allows is a function of (grammar, output tokens), so any worker can go on where another stopped.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from shared.errors import GrammarError
from shared.schema_limits import check_schema
from shared.tokenizer import Tokenizer

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]

WHITESPACE = r"[ ]?|\r?\n[ \t]{0,32}"
"""Between the parts of JSON: a space, or a new line and its indentation. Without an end, a small model fills its answer
with blanks."""

_JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": False}
_LIMITS = LLParserLimits(max_grammar_size=200_000, max_lexer_states=100_000, verbose_errors=False)
_MAX_REASON = 300  # characters of llguidance's explanation


def json_body(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """`schema` with this module's options for llguidance in it.

    :raises GrammarError: it says what llguidance would not hold to.
    """
    check_schema(schema)
    options = {"x-guidance": _JSON_OPTIONS}
    if isinstance(schema, dict):
        return {**schema, **options}
    return options if schema else {"not": {}, **options}


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """The grammar of JSON texts that are valid by `schema`."""
    return json.dumps({"grammars": [{"json_schema": json_body(schema)}]}, ensure_ascii=False)


def to_grammar(kind: GrammarKind, text: str) -> str:
    """llguidance's text of a client's grammar; whether it can be compiled, `Vocabulary.matcher` says.

    :param text: a JSON schema, a regular expression (Rust's syntax), a JSON list of strings, or Lark or GBNF.
    :raises GrammarError: not even the outside is right.
    """
    try:
        if kind == "json_schema":
            return json_grammar(json.loads(text))
        return grammar_from(kind, text)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as exc:
        raise GrammarError(str(exc)[:_MAX_REASON] or type(exc).__name__) from None


class Vocabulary:
    """A tokenizer's tokens as llguidance wants them. Immutable; takes about half a second to make."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = 0) -> None:
        """:param vocab_size: the model's, which may be padded beyond the tokenizer's; 0 = the tokenizer's.

        :raises GrammarError: the tokenizer has no end token, or is of a kind that llguidance does not know.
        """
        self.vocab_size = vocab_size or tokenizer.vocab_size
        if not tokenizer.end_token_ids:
            raise GrammarError("the model names no end token, so that no grammar could end")
        ends = [token for token in tokenizer.end_token_ids if token < self.vocab_size]
        try:
            tokens = TokenizerWrapper(SpelledTokens(tokenizer, ends, self.vocab_size))
            self._tokens = LLTokenizer(tokens, eos_token=ends)
        except Exception as exc:  # the library raises bare ValueErrors and more
            raise GrammarError(f"the model's tokenizer cannot be used for grammars: {exc}") from None

    def matcher(self, grammar: str) -> "Matcher":
        """Compile; milliseconds, in bad cases without end: see `services.gateway.grammar_check`.

        :raises GrammarError: it cannot be compiled. The message is for the client.
        """
        inner = LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        if inner.is_error():
            raise GrammarError(_reason(inner))
        return Matcher(inner)


class SpelledTokens:
    """A tokenizer as llguidance's wrapper wants it. Special tokens never stand for their text: were they allowed as
    text, they would not be shown, or would end the answer, and it would no longer be what the grammar asks."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], vocab_size: int) -> None:
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        backend.encode_special_tokens = True  # their text as ordinary tokens
        self._backend = backend
        known = {i for i in backend.get_vocab(with_added_tokens=True).values() if i < vocab_size}
        added = backend.get_added_tokens_decoder()
        special = known & {*ends, *(token_id for token_id, token in added.items() if token.special)}
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(special)
        self._special = special
        self.tokens = [tokenizer.token_bytes(i) if i in known else b"" for i in range(vocab_size)]
        self._by_bytes = {text: i for i, text in enumerate(self.tokens) if text and i not in special}
        self._longest = max(map(len, self._by_bytes))

    def __call__(self, data: bytes) -> list[int]:
        """Tokens whose bytes are `data`, as the model would write them. Never raises: llguidance would abort."""
        text = data.decode(errors="replace")
        # Tokenizers that put a blank before a text do not do it behind another character.
        for before in ("", "\x02"):
            ids = self._backend.encode(before + text, add_special_tokens=False).ids
            spelled = [self.tokens[i] if i < len(self.tokens) else b"" for i in ids]
            first = next((n + 1 for n in range(len(ids)) if before and spelled[n].strip(b" ") == before.encode()), 0)
            if b"".join(spelled[first:]) == data and self._special.isdisjoint(ids):
                return ids[first:]
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token first; bytes that no token has are left out."""
        ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._by_bytes), 0)
            if size:
                ids.append(self._by_bytes[data[at : at + size]])
            at += size or 1
        return ids


class Matcher:
    """A place in a grammar. Mutable; one thread at a time."""

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner
        self.num_tokens = 0  # consumed

    def copy(self) -> "Matcher":
        copy = Matcher(self._inner.deep_copy())
        copy.num_tokens = self.num_tokens
        return copy

    def advance(self, token_ids: Sequence[int]) -> None:
        """:raises GrammarError: the grammar does not allow them; the matcher is of no use any more."""
        if token_ids and not self._inner.consume_tokens(list(token_ids)):
            raise GrammarError(_reason(self._inner))
        self.num_tokens += len(token_ids)

    def fill(self, row: npt.NDArray[np.uint32]) -> None:
        """Write what may come next: bit t % 32 of word t // 32 is token t. An end token is allowed exactly where the
        grammar accepts, and then alone if it cannot go on.

        :param row: `[ceil(vocab / 32)]`, contiguous.
        :raises GrammarError: too complex, or nothing is allowed.
        """
        assert row.flags.c_contiguous
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._inner.is_error():
            raise GrammarError(_reason(self._inner))
        if not row.any():
            raise GrammarError("the grammar allows no token of the model")

    @property
    def accepts(self) -> bool:
        """Whether the output may end here."""
        return self._inner.is_accepting()

    @property
    def is_over(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._inner.is_stopped()


def _reason(inner: LLMatcher) -> str:
    """The first lines of llguidance's message: no parser state, nothing of this server."""
    text = " ".join(inner.get_error().split())
    return text[:_MAX_REASON] or "the grammar cannot be followed"
