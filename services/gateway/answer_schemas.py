"""What answers hold, as JSON Schema, for the OpenAPI document. Answers may hold more than is named here."""

from typing import Any

JsonSchema = dict[str, Any]
_TEXT: JsonSchema = {"type": "string"}
_MAYBE_TEXT: JsonSchema = {"type": ["string", "null"]}
_COUNT: JsonSchema = {"type": "integer", "minimum": 0}
_MAYBE: JsonSchema = {"type": ["object", "null"]}
_REASON: JsonSchema = {"enum": ["stop", "length", "tool_calls"]}


def _object(**properties: JsonSchema) -> JsonSchema:
    """All of them are there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT)
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT, prompt_tokens_details=_MAYBE)
_MESSAGE = _object(role={"const": "assistant"}, content=_MAYBE_TEXT, refusal=_MAYBE_TEXT)
_HEAD = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "usage": _USAGE}
_STATUS: JsonSchema = {"enum": ["completed", "incomplete"]}
_OUTPUT: JsonSchema = {
    "anyOf": [
        _object(
            id=_TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            status=_STATUS,
            content=_list(_object(type={"const": "output_text"}, text=_TEXT, annotations=_list({}))),
        ),
        _object(id=_TEXT, type={"const": "function_call"}, status=_STATUS, call_id=_TEXT, name=_TEXT, arguments=_TEXT),
        _object(
            id=_TEXT,
            type={"const": "reasoning"},
            status=_STATUS,
            summary=_list({}),
            content=_list(_object(type={"const": "reasoning_text"}, text=_TEXT)),
        ),
    ]
}

ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT))
ANSWERS: dict[str, JsonSchema] = {
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data=_list(_MODEL)),
    "Completion": _object(
        **_HEAD,
        object={"const": "text_completion"},
        choices=_list(_object(index=_COUNT, text=_TEXT, logprobs=_MAYBE, finish_reason=_REASON)),
    ),
    "ChatCompletion": _object(
        **_HEAD,
        object={"const": "chat.completion"},
        choices=_list(_object(index=_COUNT, message=_MESSAGE, logprobs=_MAYBE, finish_reason=_REASON)),
    ),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status=_STATUS,
        output=_list(_OUTPUT),
        incomplete_details=_MAYBE,
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_list(_COUNT),
        token_strs={"anyOf": [_list(_MAYBE_TEXT), {"type": "null"}]},
    ),
    "Text": _object(prompt=_TEXT),
    "Version": _object(version=_TEXT),
}
