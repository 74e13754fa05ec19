"""The JSON of OpenAI's responses. One class for each endpoint; both give bytes."""

from typing import Any, Protocol

import msgspec

from services.gateway.errors import ApiError
from services.gateway.generation import Delta, Usage

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


class Wire(Protocol):
    """One response of an endpoint."""

    done: bytes  # what ends a stream that went well

    def first(self, num_choices: int) -> bytes:
        """Events before any text."""
        ...

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, texts: list[str], reasons: list[str], usage: Usage) -> bytes:
        """The response that is not streamed."""
        ...

    def error(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        ...


class _Base:
    done = DONE

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head: dict[str, Any] = {"id": response_id, "created": created, "model": model}
        self._include_usage = include_usage

    def error(self, error: ApiError) -> bytes:
        return sse(error.body())

    def _event(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        value = {**self._head, "object": kind, "choices": choices}
        if self._include_usage:
            value["usage"] = usage
        return sse(value)

    def _whole(self, kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return _encode({**self._head, "object": kind, "choices": choices, "usage": _usage(usage)})


class CompletionWire(_Base):
    _KIND = "text_completion"

    def first(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        return self._event(self._KIND, [_completion_choice(delta.choice, delta.text, delta.finish_reason)])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(self._KIND, [], _usage(usage))

    def whole(self, texts: list[str], reasons: list[str], usage: Usage) -> bytes:
        pairs = zip(texts, reasons, strict=True)
        choices = [_completion_choice(i, text, reason) for i, (text, reason) in enumerate(pairs)]
        return self._whole(self._KIND, choices, usage)


class ChatWire(_Base):
    _KIND = "chat.completion.chunk"

    def first(self, num_choices: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event(self._KIND, [_chat_choice(i, delta, None)]) for i in range(num_choices))

    def chunk(self, delta: Delta) -> bytes:
        """The finish reason has an event of its own, with an empty delta, as OpenAI sends it."""
        events = b""
        if delta.text:
            events += self._event(self._KIND, [_chat_choice(delta.choice, {"content": delta.text}, None)])
        if delta.finish_reason is not None:
            events += self._event(self._KIND, [_chat_choice(delta.choice, {}, delta.finish_reason)])
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(self._KIND, [], _usage(usage))

    def whole(self, texts: list[str], reasons: list[str], usage: Usage) -> bytes:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return self._whole("chat.completion", choices, usage)


def _completion_choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _chat_choice(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.num_cached_tokens
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
