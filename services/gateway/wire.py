"""The JSON of OpenAI's responses. Completions here, chats in `chat_wire.py`; both give bytes."""

from typing import Any, Protocol

import msgspec

from services.gateway.errors import ApiError
from services.gateway.generation import Delta, Usage

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


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


class BaseWire:
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
        return encode_json({**self._head, "object": kind, "choices": choices, "usage": usage_object(usage)})


class CompletionWire(BaseWire):
    _KIND = "text_completion"

    def first(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        return self._event(self._KIND, [_completion_choice(delta.choice, delta.text, delta.finish_reason)])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._event(self._KIND, [], usage_object(usage))

    def whole(self, texts: list[str], reasons: list[str], usage: Usage) -> bytes:
        pairs = zip(texts, reasons, strict=True)
        choices = [_completion_choice(i, text, reason) for i, (text, reason) in enumerate(pairs)]
        return self._whole(self._KIND, choices, usage)


def _completion_choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def usage_object(usage: Usage) -> dict[str, Any]:
    cached = usage.num_cached_tokens
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
