"""Structured output: which tokens a grammar allows next. The one home of llguidance.

A grammar travels as llguidance's own text (JSON or Lark; https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
What it allows is a function of (grammar, output tokens), so any worker can go on where another stopped.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from shared.errors import GrammarError
from shared.tokenizer import Tokenizer

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]

WHITESPACE = r"[ ]?|\r?\n[ \t]{0,32}"
"""Between the parts of JSON: a space, or a new line and its indentation. Without an end, a small model fills its answer
with blanks."""

_JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": False}
_LIMITS = LLParserLimits(max_grammar_size=200_000, max_lexer_states=100_000, verbose_errors=False)
_MAX_REASON = 300  # characters of llguidance's explanation


def json_body(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """`schema` with this module's options for llguidance in it."""
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
            self._tokens = LLTokenizer(tokenizer.backend.to_str(), n_vocab=self.vocab_size, eos_token=ends)
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
