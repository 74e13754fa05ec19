"""The `messages` of a chat, checked, as chat templates expect them."""

from typing import Any

import msgspec

from services.gateway.errors import bad_field
from services.gateway.fields import Fields, checked_text
from services.gateway.nested_json import decode_json

MAX_MESSAGES = 4096
MAX_CALLS = 128
_ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": _CONTENT,
            "name": {"type": ["string", "null"]},
            "tool_calls": {"anyOf": [{"type": "array", "maxItems": MAX_CALLS}, {"type": "null"}]},
        },
        "required": ["role"],
    },
}
"""A model's template may refuse more: roles that do not alternate, for example."""

ChatMessage = dict[str, Any]
"""role and content (text); name, reasoning_content, tool_calls and tool_call_id where there are any. A call's arguments
are an object here, as templates want them."""


def read_messages(fields: Fields) -> list[ChatMessage]:
    """:raises ApiError: 400 that names the part which is wrong."""
    value = fields.get("messages", MESSAGES_SCHEMA, required=True)
    if not isinstance(value, list) or not value:
        raise bad_field("messages", "messages must be a list with at least one message.")
    if len(value) > MAX_MESSAGES:
        raise bad_field("messages", f"messages may hold at most {MAX_MESSAGES} messages.")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise bad_field(where, f"{where} must be an object.")
    fields = Fields(value, where + ".")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise bad_field(fields.path(name), f"{fields.path(name)} is not supported by this server.", "unsupported")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_field(fields.path("role"), f"{fields.path('role')} must be one of {', '.join(_ROLES)}.")
    message: ChatMessage = {"role": role, "content": _content(value.get("content"), role, fields.path("content"))}
    if name := fields.text("name"):
        message["name"] = name
    if calls := _calls(fields, role):
        message["tool_calls"] = calls
    if role == "assistant" and (reasoning := fields.text("reasoning_content")):
        message["reasoning_content"] = reasoning
    if role == "tool" and (call_id := fields.text("tool_call_id")):
        message["tool_call_id"] = call_id
    return message


def _content(value: Any, role: str, where: str) -> str:
    """Text, or text parts, which are joined by line breaks as vLLM does."""
    if value is None and role == "assistant":
        return ""
    if not isinstance(value, list):
        return checked_text(where, value)
    parts: list[str] = []
    for i, part in enumerate(value):
        fields = Fields(part if isinstance(part, dict) else {}, f"{where}[{i}].")
        if fields.get("type") != "text":
            raise bad_field(fields.path("type"), f"{fields.path('type')} must be 'text': nothing else is supported.")
        parts.append(checked_text(fields.path("text"), fields.get("text")))
    return "\n".join(parts)


def _calls(fields: Fields, role: str) -> list[dict[str, Any]]:
    path, value = fields.path("tool_calls"), fields.get("tool_calls")
    if value is None:
        return []
    if value and role != "assistant":
        raise bad_field(path, f"{path} belongs in messages of the assistant.")
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise bad_field(path, f"{path} must be a list of at most {MAX_CALLS} calls.")
    return [_call(item, f"{path}[{i}]") for i, item in enumerate(value)]


def _call(value: Any, where: str) -> dict[str, Any]:
    call = Fields(value if isinstance(value, dict) else {}, where + ".")
    function = call.object("function")
    if function is None or call.get("type") not in (None, "function"):
        raise bad_field(where, f"{where} must be an object of type function, with the function.")
    name = function.text("name")
    if not name:
        raise bad_field(function.path("name"), f"{function.path('name')} is missing.")
    arguments = checked_arguments(function.get("arguments"), function.path("arguments"))
    out: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call_id := call.text("id"):
        out["id"] = call_id
    return out


def checked_arguments(value: Any, path: str) -> dict[str, Any]:
    """A call's arguments, an object or its JSON, as the object.

    :raises ApiError: 400, they are something else.
    """
    if isinstance(value, str):
        try:
            value = decode_json(checked_text(path, value) or "{}")
        except msgspec.MsgspecError:
            value = None
    if not isinstance(value, dict):
        raise bad_field(path, f"{path} must be a JSON object, as text.")
    return value
