"""The JSON of OpenAI's responses. One class for each endpoint; both give bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from services.gateway.answers import Answer
from services.gateway.choice import Delta, Logged
from services.gateway.generation import Usage
from services.gateway.logprobs import LogprobWriter
from shared.messages import TokenLogprobs

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of a response have in common."""

    response_id: str
    created: int
    model: str
    include_usage: bool
    writer: LogprobWriter
    prompts: Sequence[Sequence[int]] = ()  # token ids of each choice's prompt, where `prompt_logprobs` is asked for


class Wire(Protocol):
    """One response of an endpoint."""

    def first(self, num_choices: int) -> bytes:
        """Events before any text."""
        ...

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The response that is not streamed."""
        ...


class _Base:
    def __init__(self, head: Head) -> None:
        self._head: dict[str, Any] = {"id": head.response_id, "created": head.created, "model": head.model}
        self._include_usage, self._writer = head.include_usage, head.writer
        self._prompts = head.prompts

    def _event(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        value = {**self._head, "object": kind, "choices": choices}
        if self._include_usage:
            value["usage"] = usage
        return sse(value)

    def _whole(self, kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return _encode({**self._head, "object": kind, "choices": choices, "usage": _usage(usage)})

    def _prompt(self, index: int, told: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`, if they were asked for."""
        if told is None or not self._prompts:
            return {}
        return {"prompt_logprobs": self._writer.prompt(self._prompts[index], told)}


class CompletionWire(_Base):
    _KIND = "text_completion"

    def first(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        choice = self._choice(delta.choice, delta.text, delta.logged, delta.finish_reason)
        return self._event(self._KIND, [choice | self._prompt(delta.choice, delta.prompt_logprobs)])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(self._KIND, [], _usage(usage))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            self._choice(i, answer.text, answer.logged, answer.reason) | self._prompt_of(answer)
            for i, answer in enumerate(answers)
        ]
        return self._whole(self._KIND, choices, usage)

    def _prompt_of(self, answer: Answer) -> dict[str, Any]:
        if answer.prompt_logprobs is None or not self._prompts:
            return {}
        return {"prompt_logprobs": self._writer.prompt(answer.token_ids, answer.prompt_logprobs)}

    def _choice(self, index: int, text: str, logged: Sequence[Logged], reason: str | None) -> dict[str, Any]:
        logprobs = self._writer.completion(logged) if self._writer.is_on and (logged or reason is not None) else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatWire(_Base):
    _KIND = "chat.completion.chunk"

    def first(self, num_choices: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event(self._KIND, [_chat_choice(i, delta, None)]) for i in range(num_choices))

    def chunk(self, delta: Delta) -> bytes:
        """The finish reason has an event of its own, with an empty delta, as OpenAI sends it."""
        events = b""
        logprobs = self._writer.chat(delta.logged) if self._writer.is_on and delta.logged else None
        if delta.text or logprobs:
            choice = _chat_choice(delta.choice, {"content": delta.text}, None, logprobs)
            events += self._event(self._KIND, [choice])
        if delta.finish_reason is not None:
            events += self._event(self._KIND, [_chat_choice(delta.choice, {}, delta.finish_reason)])
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(self._KIND, [], _usage(usage))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._writer.chat(answer.logged) if self._writer.is_on else None,
                "finish_reason": answer.reason,
            }
            for i, answer in enumerate(answers)
        ]
        told = answers[0].prompt_logprobs if self._prompts else None
        if told is not None:
            self._head["prompt_logprobs"] = self._writer.prompt(answers[0].token_ids, told)
        return self._whole("chat.completion", choices, usage)


def _chat_choice(
    index: int, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.num_cached_tokens
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
