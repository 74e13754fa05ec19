"""One choice of an answer: tokens in, text out, and what is told of each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.gateway.stop_strings import StopMatcher
from shared.messages import Finished, FinishReason, GenerateRequest, TokenLogprobs
from shared.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Shown:
    """How answers are to look. The defaults are those of OpenAI's API."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False  # the stop string, and a stop token's text, stay in the text
    skip_special_tokens: bool = True
    echo: bool = False  # the prompt comes before the answer
    logprobs: bool = False
    prompt_only: bool = False  # max_tokens was 0: one token is generated all the same, and is not shown


@dataclass(frozen=True, slots=True)
class Logged:
    """What is told of one token."""

    token_id: int
    offset: int  # of the choice's text: where the token's text begins
    told: TokenLogprobs | None  # None: the prompt's first token


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice and the tokens that it came with; with a reason, the choice's last."""

    choice: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: tuple[int, ...] = ()
    logged: tuple[Logged, ...] = ()  # if logprobs are wanted; the prompt's too, if it is echoed
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the choice's first delta, if wanted
    num_output_tokens: int = 0  # of the choice so far


class Choice:
    """Owns the text of one choice. `choice` is its number in the request, `index` that in the response."""

    def __init__(self, request: GenerateRequest, choice: int, index: int, tokenizer: Tokenizer, shown: Shown) -> None:
        self.index = index
        self.reason: FinishReason | None = None
        self.num_output_tokens = 0
        self._request, self._tokenizer, self._shown, self.number = request, tokenizer, shown, choice
        self._ends = frozenset(request.sampling.stop_token_ids)
        self._text = tokenizer.detokenizer(skip_special_tokens=shown.skip_special_tokens)
        self._stops = StopMatcher(shown.stops, include=shown.include_stop)
        self.is_cut = False  # it ended with a stop string, which only the gateway knows
        self.told_epoch, self.told_at = 0, 0.0  # the worker of this epoch was told then
        self._begun = False
        self._chars = 0  # of text that is certain, shown or not
        self._last: int | None = None

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], prompt_logprobs: Sequence[TokenLogprobs]
    ) -> Delta:
        """Sets `reason` on a stop string, and among several choices on any end; tokens beyond it do not count."""
        before, log, told = self._begin(prompt_logprobs)
        if self._shown.prompt_only:
            return Delta(self.index, before, None, (), tuple(log), told)
        parts = [before]
        taken = 0
        for token_id in token_ids:
            if self._shown.logprobs:
                log.append(Logged(token_id, self._chars, logprobs[taken] if taken < len(logprobs) else None))
            taken += 1
            parts.append(self._push_one(token_id))
            if self.reason is not None:
                break
        self._end_among_others(parts)
        said = "".join(parts)
        taken_ids, count = tuple(token_ids[:taken]), self.num_output_tokens
        return Delta(self.index, said, self._finish(), taken_ids, tuple(log), told, count)

    def finish(self, event: Finished) -> Delta:
        """The last text: what was held back. Sets `reason`."""
        before, log, told = self._begin(())
        self.reason = event.reason
        if event.reason in ("stop", "length") and self.number and self._last not in self._ends:
            self.reason = "length"
        elif event.reason in ("stop", "length") and self.number:
            self.reason = "stop"
        if self._shown.prompt_only and event.reason in ("stop", "length"):
            self.reason = "length"
        text = before + self._flush()
        return Delta(self.index, text, self._finish(), (), tuple(log), told, self.num_output_tokens)

    def _finish(self) -> Literal["stop", "length"] | None:
        return self.reason if self.reason in ("stop", "length") else None

    def _push_one(self, token_id: int) -> str:
        self.num_output_tokens += 1
        self._last = token_id
        if token_id in self._ends and not self._shown.include_stop:
            return ""
        text = self._text.push(token_id)
        self._chars += len(text)
        if self.num_output_tokens <= self._request.sampling.min_tokens:
            return text  # too early for stop strings
        text, hit = self._stops.push(text)
        if hit:
            self.reason, self.is_cut = "stop", True
        return text

    def _end_among_others(self, parts: list[str]) -> None:
        """The request's end comes with its last choice: the others' are known by their tokens."""
        if self.reason is not None or self._request.num_choices == 1:
            return
        if self._last in self._ends:
            self.reason = "stop"
        elif self.num_output_tokens >= self._request.sampling.max_tokens:
            self.reason = "length"
        if self.reason is not None:
            parts.append(self._flush())

    def _flush(self) -> str:
        text, hit = self._stops.push(self._text.flush())
        if hit:
            self.reason = "stop"
        return text if hit else text + self._stops.flush()

    def _begin(
        self, prompt_logprobs: Sequence[TokenLogprobs]
    ) -> tuple[str, list[Logged], tuple[TokenLogprobs, ...] | None]:
        """Once, before the first text: the prompt, if it is echoed, and what is told of it."""
        if self._begun:
            return "", [], None
        self._begun = True
        told = tuple(prompt_logprobs) if self._request.sampling.prompt_logprobs is not None else None
        if not self._shown.echo:
            return "", [], told
        text, log = self._echo(told)
        return text, log if self._shown.logprobs else [], told

    def _echo(self, told: Sequence[TokenLogprobs] | None) -> tuple[str, list[Logged]]:
        decoder = self._tokenizer.detokenizer(skip_special_tokens=self._shown.skip_special_tokens)
        parts: list[str] = []
        log: list[Logged] = []
        by_token = (None, *(told or ()))
        for i, token_id in enumerate(self._request.token_ids):
            log.append(Logged(token_id, self._chars, by_token[i] if i < len(by_token) else None))
            parts.append(decoder.push(token_id))
            self._chars += len(parts[-1])
        parts.append(decoder.flush())
        self._chars += len(parts[-1])
        return "".join(parts), log
