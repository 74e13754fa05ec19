"""The `prompt` of a completion and the `messages` of a chat, checked."""

from typing import Any

from services.gateway.errors import bad_field
from services.gateway.fields import Fields, checked_text

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
_ROLES = ("system", "developer", "user", "assistant")

Prompt = str | list[int]
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
        "properties": {"role": {"enum": list(_ROLES)}, "content": _CONTENT, "name": {"type": ["string", "null"]}},
        "required": ["role"],
    },
}
"""A model's template may refuse more: roles that do not alternate, for example."""


def prompt_schema(vocab_size: int) -> dict[str, Any]:
    """What `read_prompts` takes."""
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    several = {"minItems": 1, "maxItems": MAX_PROMPTS}
    return {"anyOf": [text, ids, *({"type": "array", "items": kind, **several} for kind in (text, ids))]}


def read_prompts(fields: Fields, vocab_size: int) -> list[Prompt]:
    """The prompts: a text, several, token ids, or several lists of them.

    :raises ApiError: 400 that names `prompt`.
    """
    value = fields.get("prompt", prompt_schema(vocab_size), required=True)
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", "prompt must be a string, token ids, or a list of either; and not empty.")
    if type(value[0]) is int:
        return [_token_ids(value, vocab_size)]
    if len(value) > MAX_PROMPTS:
        raise bad_field("prompt", f"prompt may hold at most {MAX_PROMPTS} prompts.")
    if isinstance(value[0], str):
        return [_text(item) for item in value]
    return [_token_ids(item, vocab_size) for item in value]


def read_messages(fields: Fields, *, required: bool = True) -> list[dict[str, str]]:
    """The messages as chat templates expect them: role, content, and name if there is one.

    :raises ApiError: 400 that names the part which is wrong.
    """
    value = fields.get("messages", MESSAGES_SCHEMA, required=required)
    if not isinstance(value, list) or not value:
        raise bad_field("messages", "messages must be a list with at least one message.")
    if len(value) > MAX_MESSAGES:
        raise bad_field("messages", f"messages may hold at most {MAX_MESSAGES} messages.")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _text(value: Any) -> str:
    if not checked_text("prompt", value):
        raise bad_field("prompt", "A prompt must not be empty.")
    return value


def _token_ids(value: Any, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not value or any(type(i) is not int for i in value):
        raise bad_field("prompt", "A prompt must be a string or a list of token ids, and not empty.")
    if min(value) < 0 or max(value) >= vocab_size:
        raise bad_field("prompt", f"Token ids must be between 0 and {vocab_size - 1}.")
    return value


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_field(where, f"{where} must be an object.")
    fields = Fields(value, where + ".")
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise bad_field(fields.path(name), f"{fields.path(name)} is not supported by this server.", "unsupported")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_field(fields.path("role"), f"{fields.path('role')} must be one of {', '.join(_ROLES)}.")
    message = {"role": role, "content": _content(value.get("content"), role, fields.path("content"))}
    if name := fields.text("name"):
        message["name"] = name
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
