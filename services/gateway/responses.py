"""`POST /v1/responses`, the stateless part: a chat in other words. A request is put into those of chat completions and
served as one; nothing is stored, so whatever refers to something stored is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.endpoints import ChatEndpoint, Prepared
from services.gateway.errors import ApiError, bad_field
from services.gateway.fields import Fields, checked_text
from services.gateway.messages import MAX_MESSAGES
from services.gateway.params import check_model, same_json
from services.gateway.responses_wire import Echo, ResponsesWire
from shared.randomness import Randomness

_OFF: tuple[Any, ...] = (False, 0, [], {}, "")
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "previous_response_id",
            "conversation",
            "store",
            "background",
            "include",
            "prompt",
            "tools",
            "reasoning",
            "max_tool_calls",
            "top_logprobs",
            "context_management",
        ),
        _OFF,
    ),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
}
"""Field -> the values (beside null) with which it changes nothing."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text")
_MAX = 2**63 - 1

_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_TEXT_TYPES)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", None]},
        "role": {"enum": list(_ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
    "required": ["role", "content"],
}
INPUT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _ITEM}]
}
FORMAT_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
    "required": ["type"],
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, checked."""

    messages: list[dict[str, str]]
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool
    format: dict[str, Any]
    echo: Echo

    def as_chat(self) -> dict[str, Any]:
        """The same as a request of chat completions."""
        chat: dict[str, Any] = {
            "messages": self.messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        if self.format["type"] == "json_schema":
            inner = {name: value for name, value in self.format.items() if name != "type"}
            chat["response_format"] = {"type": "json_schema", "json_schema": inner}
        elif self.format["type"] != "text":
            chat["response_format"] = self.format
        return chat


class ResponsesEndpoint(ChatEndpoint):
    name = "responses"
    id_prefix = "resp"

    def read_all(self, fields: Fields) -> None:
        check_model(fields, self._parts.model_name)
        _read(fields)

    async def prepare(
        self, fields: Fields, response_id: str, randomness: Randomness | None = None, tenant: str = ""
    ) -> Prepared:
        check_model(fields, self._parts.model_name)
        asked = _read(fields)
        try:
            prepared = await super().prepare(Fields(asked.as_chat()), response_id, randomness, tenant)
        except ApiError as exc:
            raise _in_our_words(exc) from None
        created = int(self._parts.services.clock.wall())
        wire = ResponsesWire(response_id, created, self._parts.model_name, asked.echo)
        return replace(prepared, wire=wire)


def _in_our_words(error: ApiError) -> ApiError:
    """A refusal of chat completions names a field that the client has not sent."""
    names = {"messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}
    if error.param:
        head, dot, rest = error.param.partition(".")
        error.param = "text.format" if head == "response_format" else names.get(head, head) + dot + rest
    return error


def _read(fields: Fields) -> _Asked:
    """:raises ApiError: 400 that names the first field which is wrong."""
    for name, value in fields.raw.items():
        harmless = REFUSED.get(name)
        if value is not None and harmless is not None and not any(same_json(value, other) for other in harmless):
            raise bad_field(name, f"{name} is not supported by this server: it keeps nothing.", "unsupported")
    instructions = fields.text("instructions")
    max_output_tokens = fields.integer("max_output_tokens", 1, _MAX)
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1, above_low=True)
    stream = fields.boolean("stream")
    form = _format(fields)
    echo = Echo(
        instructions=instructions,
        max_output_tokens=max_output_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        parallel_tool_calls=fields.boolean("parallel_tool_calls"),
        metadata=_metadata(fields),
        user=fields.text("user"),
        text_format=form,
    )
    messages = _messages(fields)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    return _Asked(messages, max_output_tokens, temperature, top_p, stream, form, echo)


def _metadata(fields: Fields) -> dict[str, Any]:
    value = fields.get("metadata", {"type": "object"})
    if value is not None and not isinstance(value, dict):
        raise bad_field("metadata", "metadata must be an object.")
    return value or {}


def _format(fields: Fields) -> dict[str, Any]:
    text = fields.object("text")
    value = None if text is None else text.get("format", FORMAT_SCHEMA)
    if value is None:
        return {"type": "text"}
    if not isinstance(value, dict) or value.get("type") not in FORMAT_SCHEMA["properties"]["type"]["enum"]:
        raise bad_field("text.format", "text.format must be an object with the type text, json_object or json_schema.")
    return value


def _messages(fields: Fields) -> list[dict[str, str]]:
    value = fields.get("input", INPUT_SCHEMA, required=True)
    if isinstance(value, str):
        return [{"role": "user", "content": checked_text("input", value)}]
    if not isinstance(value, list) or not value:
        raise bad_field("input", "input must be a string, or a list of messages that is not empty.")
    if len(value) > MAX_MESSAGES:
        raise bad_field("input", f"input may hold at most {MAX_MESSAGES} messages.")
    return [_message(item, f"input[{i}]") for i, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_field(where, f"{where} must be an object.")
    if value.get("type") not in (None, "message"):
        raise bad_field(f"{where}.type", f"{where}.type must be 'message': nothing else is supported.", "unsupported")
    if value.get("role") not in _ROLES:
        raise bad_field(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}.")
    return {"role": value["role"], "content": _content(value.get("content"), f"{where}.content")}


def _content(value: Any, where: str) -> str:
    """Text, or text parts, joined as in chat completions."""
    if not isinstance(value, list):
        return checked_text(where, value)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    kinds: Sequence[str] = _TEXT_TYPES
    if not isinstance(part, dict) or part.get("type") not in kinds:
        raise bad_field(f"{where}.type", f"{where}.type must be one of {', '.join(kinds)}.", "unsupported")
    return checked_text(f"{where}.text", part.get("text"))
