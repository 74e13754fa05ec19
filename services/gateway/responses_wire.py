"""The JSON of `/v1/responses`: one object, or OpenAI's typed events ("Streaming responses" in its reference)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.answer import AnswerParser, AnswerShape
from services.gateway.answers import Answer
from services.gateway.chat_wire import parse
from services.gateway.choice import Delta
from services.gateway.errors import ApiError
from services.gateway.generation import Usage
from services.gateway.logprobs import LogprobWriter
from services.gateway.responses_items import Event, OutputItems, Status

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Echo:
    """What a response repeats of its request."""

    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    metadata: dict[str, Any]
    user: str | None
    text_format: dict[str, Any]
    tools: list[Any]
    tool_choice: Any


class ResponsesWire:
    """One response. Implements `services.gateway.wire.Wire`; it has one choice."""

    done = b""  # the last event says that it is the last

    def __init__(self, response_id: str, created: int, model: str, echo: Echo, shape: AnswerShape) -> None:
        self.writer: LogprobWriter | None = None
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "instructions": echo.instructions,
            "max_output_tokens": echo.max_output_tokens,
            "temperature": echo.temperature,
            "top_p": echo.top_p,
            "parallel_tool_calls": echo.parallel_tool_calls,
            "metadata": echo.metadata,
            "user": echo.user,
            "previous_response_id": None,
            "store": False,
            "text": {"format": echo.text_format},
            "tool_choice": echo.tool_choice,
            "tools": echo.tools,
            "truncation": "disabled",
        }
        self._parser = AnswerParser(shape)
        self._output = OutputItems(response_id)
        self._num_events = 0
        self._reason = ""

    def first(self, num_choices: int) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def chunk(self, delta: Delta) -> bytes:
        self._reason = delta.finish_reason or self._reason
        return self._events(self._output.push(self._parser.push(delta.text, delta.num_output_tokens)))

    def usage_chunk(self, usage: Usage) -> bytes:
        """The events of the end."""
        events = self._events(self._finish(self._reason))
        whole = self._whole(self._reason, usage)
        return events + self._event(f"response.{whole['status']}", response=whole)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        self._output.push(parse(self._parser, answers[0]))
        self._output.finish(_status(answers[0].reason))
        return _encode(self._whole(answers[0].reason, usage))

    def error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _finish(self, reason: str) -> list[Event]:
        rest = self._output.push(self._parser.finish())
        return rest + self._output.finish(_status(reason))

    def _whole(self, reason: str, usage: Usage) -> dict[str, Any]:
        status = _status(reason)
        response = self._response(status, self._output.items)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens or 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.num_reasoning_tokens},
            "total_tokens": usage.num_tokens,
        }
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        ends = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **ends, "status": status, "output": output}

    def _events(self, events: list[Event]) -> bytes:
        return b"".join(self._event(kind, **values) for kind, values in events)

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **values}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _status(reason: str) -> Status:
    return "incomplete" if reason == "length" else "completed"
