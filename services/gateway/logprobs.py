"""Log-probabilities in the JSON of OpenAI's responses, and vLLM's `prompt_logprobs`."""

from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.choice import Logged
from shared.messages import TokenLogprobs
from shared.tokenizer.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say; as in vLLM."""


class LogprobWriter:
    """Knows what tokens are called: their text, or `bytes:\\xe2\\x80` where they are a part of a character."""

    def __init__(self, tokenizer: Tokenizer, *, is_on: bool, prompts: Sequence[Sequence[int]] = ()) -> None:
        """
        :param is_on: the client asked for logprobs of the answer.
        :param prompts: token ids of each choice's prompt, where the client asked for `prompt_logprobs`.
        """
        self._tokenizer, self.is_on, self._prompts = tokenizer, is_on, prompts

    def completion(self, logged: Sequence[Logged]) -> dict[str, Any]:
        """The `logprobs` of a completion's choice. The chosen token is always among the top ones."""
        tops: list[dict[str, float] | None] = []
        for one in logged:
            if one.told is None:
                tops.append(None)
                continue
            top = {self.name(token): _finite(logprob) for token, logprob in reversed(one.told.top)}
            tops.append(top | {self.name(one.token_id): _finite(one.told.logprob)})
        return {
            "tokens": [self.name(one.token_id) for one in logged],
            "token_logprobs": [None if one.told is None else _finite(one.told.logprob) for one in logged],
            "top_logprobs": tops,
            "text_offset": [one.offset for one in logged],
        }

    def chat(self, logged: Sequence[Logged]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content: list[dict[str, Any]] = []
        for one in logged:
            logprob, top = (LEAST, ()) if one.told is None else (one.told.logprob, one.told.top)
            content.append(self._entry(one.token_id, logprob) | {"top_logprobs": [self._entry(*pair) for pair in top]})
        return {"content": content, "refusal": None}

    def prompt_of(self, index: int, told: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """The field of a choice; none if it was not asked for."""
        return {"prompt_logprobs": self.prompt(self._prompts[index], told)} if self._prompts else {}

    def prompt(self, token_ids: Sequence[int], told: Iterable[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: by token id, null for the first token."""
        out: list[dict[str, Any] | None] = [None]
        for token_id, one in zip(token_ids[1:], told, strict=False):
            ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)}
            ranked.setdefault(token_id, (one.logprob, one.rank))
            out.append(
                {
                    str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.name(token)}
                    for token, (logprob, rank) in ranked.items()
                }
            )
        return out

    def name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": self.name(token_id), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
