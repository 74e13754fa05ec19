"""The JSON of OpenAI's responses. Completions here, chats in `chat_wire.py`; both give bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from services.gateway.answers import Answer
from services.gateway.choice import Delta, Logged
from services.gateway.errors import ApiError
from services.gateway.generation import Usage
from services.gateway.logprobs import LogprobWriter

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


class Wire(Protocol):
    """One response of an endpoint."""

    writer: LogprobWriter | None  # of the log-probabilities that were asked for

    done: bytes  # what ends a stream that went well

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

    def error(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        ...


class BaseWire:
    done = DONE

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head: dict[str, Any] = {"id": response_id, "created": created, "model": model}
        self._include_usage = include_usage
        self.writer: LogprobWriter | None = None

    def error(self, error: ApiError) -> bytes:
        return sse(error.body())

    def _event(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        """:param extra: fields beside `choices`."""
        value = {**self._head, "object": kind, "choices": choices, **(extra or {})}
        if self._include_usage:
            value["usage"] = usage
        return sse(value)

    def _whole(self, kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return encode_json({**self._head, "object": kind, "choices": choices, "usage": usage_object(usage)})


class CompletionWire(BaseWire):
    _KIND = "text_completion"

    def first(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        choice = self._choice(delta.choice, delta.text, delta.logged, delta.finish_reason)
        if self.writer is not None and delta.prompt_logprobs is not None:
            choice |= self.writer.prompt_of(delta.choice, delta.prompt_logprobs)
        return self._event(self._KIND, [choice])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(self._KIND, [], usage_object(usage))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices: list[dict[str, Any]] = []
        for i, answer in enumerate(answers):
            choice = self._choice(i, answer.text, answer.logged, answer.reason)
            if self.writer is not None and answer.prompt_logprobs is not None:
                choice |= self.writer.prompt_of(answer.index, answer.prompt_logprobs)
            choices.append(choice)
        return self._whole(self._KIND, choices, usage)

    def _choice(self, index: int, text: str, logged: Sequence[Logged], reason: str | None) -> dict[str, Any]:
        wanted = self.writer is not None and self.writer.is_on and (logged or reason is not None)
        logprobs = self.writer.completion(logged) if self.writer is not None and wanted else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def usage_object(usage: Usage) -> dict[str, Any]:
    cached = usage.num_cached_tokens
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
