"""The `input` of `/v1/responses` as the messages of a chat: texts, and what came of function calls.

Nothing is kept between responses, so a client that goes on sends all items again, those of earlier outputs included.
"""

from typing import Any

from services.gateway.errors import ApiError, bad_field
from services.gateway.fields import Fields, checked_text
from services.gateway.messages import MAX_MESSAGES, ChatMessage, checked_arguments

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text")


def _object(kind: str, **properties: Any) -> dict[str, Any]:
    """An item's schema: all properties are needed."""
    return {"type": "object", "properties": {"type": {"const": kind}, **properties}, "required": ["type", *properties]}


_NAME = {"type": "string", "minLength": 1}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_TEXT_TYPES)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_MESSAGE = {
    "type": "object",
    "properties": {"type": {"enum": ["message", None]}, "role": {"enum": list(_ROLES)}, "content": _TEXTS},
    "required": ["role", "content"],
}
_REASONING = _object("reasoning")
_REASONING["properties"]["content"] = {
    "anyOf": [{"type": "array", "items": _object("reasoning_text", text={"type": "string"})}, {"type": "null"}]
}
_ITEM = {
    "anyOf": [
        _MESSAGE,
        _object("function_call", call_id=_NAME, name=_NAME, arguments={"type": "string"}),
        _object("function_call_output", call_id=_NAME, output=_TEXTS),
        _REASONING,
    ]
}
INPUT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _ITEM}]
}


def read_input(fields: Fields) -> list[ChatMessage]:
    """:raises ApiError: 400 that names the item which is wrong."""
    value = fields.get("input", INPUT_SCHEMA, required=True)
    if isinstance(value, str):
        return [{"role": "user", "content": checked_text("input", value)}]
    if not isinstance(value, list) or not value:
        raise bad_field("input", "input must be a string, or a list of items that is not empty.")
    if len(value) > MAX_MESSAGES:
        raise bad_field("input", f"input may hold at most {MAX_MESSAGES} items.")
    conversation = _Conversation()
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise bad_field(f"input[{i}]", f"input[{i}] must be an object.")
        conversation.add(Fields(item, f"input[{i}]."))
    return conversation.messages


class _Conversation:
    """What an assistant thinks, says and calls in one turn are items of their own, and one message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._call_ids: set[str] = set()

    def add(self, item: Fields) -> None:
        """:raises ApiError: 400, the item is wrong."""
        kind = item.get("type")
        match kind:
            case None | "message":
                self._message(item)
            case "reasoning":
                self._reasoning(item)
            case "function_call":
                self._call(item)
            case "function_call_output":
                self._output(item)
            case _:
                known = "message, reasoning, function_call or function_call_output"
                path = item.path("type")
                raise bad_field(path, f"{path} must be {known}: nothing else is supported.", "unsupported")

    def _message(self, item: Fields) -> None:
        role, path = item.get("role"), item.path("role")
        if role not in _ROLES:
            raise bad_field(path, f"{path} must be one of {', '.join(_ROLES)}.")
        content = _texts(item, "content")
        if role == "assistant" and self.messages and _only_thinks(self.messages[-1]):
            self.messages[-1]["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _reasoning(self, item: Fields) -> None:
        """As this server writes it, in the clear; a summary alone says nothing that a model has seen."""
        parts, path = item.get("content"), item.path("content")
        if parts is None:
            return
        if not isinstance(parts, list):
            raise bad_field(path, f"{path} must be a list of parts.")
        texts = [_part(part, f"{path}[{i}]", ("reasoning_text",)) for i, part in enumerate(parts)]
        self.messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})

    def _call(self, item: Fields) -> None:
        call_id, name = _needed(item, "call_id"), _needed(item, "name")
        text = checked_text(item.path("arguments"), item.get("arguments"))
        function = {"name": name, "arguments": checked_arguments(text, item.path("arguments"))}
        self._call_ids.add(call_id)
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"type": "function", "id": call_id, "function": function})

    def _output(self, item: Fields) -> None:
        call_id, path = _needed(item, "call_id"), item.path("call_id")
        if call_id not in self._call_ids:
            raise bad_field(path, f"{path}: no function_call with this id comes before; this server keeps none.")
        self.messages.append({"role": "tool", "content": _texts(item, "output"), "tool_call_id": call_id})


def _only_thinks(message: ChatMessage) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _needed(item: Fields, name: str) -> str:
    value = item.text(name)
    if not value:
        raise bad_field(item.path(name), f"{item.path(name)} is missing.")
    return value


def _texts(item: Fields, name: str) -> str:
    """Text, or text parts, joined as in chat completions."""
    value, path = item.get(name), item.path(name)
    if not isinstance(value, list):
        return checked_text(path, value)
    return "\n".join(_part(part, f"{path}[{i}]", _TEXT_TYPES) for i, part in enumerate(value))


def _part(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds:
        raise _wrong_part(where, kinds)
    return checked_text(f"{where}.text", part.get("text"))


def _wrong_part(where: str, kinds: tuple[str, ...]) -> ApiError:
    return bad_field(f"{where}.type", f"{where}.type must be one of {', '.join(kinds)}.", "unsupported")
