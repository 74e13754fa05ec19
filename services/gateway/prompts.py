"""The `prompt` of a completion, checked."""

from typing import Any

from services.gateway.errors import bad_field
from services.gateway.fields import Fields, checked_text

MAX_PROMPTS = 128

Prompt = str | list[int]


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
