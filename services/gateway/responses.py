"""`POST /v1/responses`, the stateless part: a chat in other words. A request is put into those of chat completions and
served as one; nothing is stored, so whatever refers to something stored is refused.
"""

from dataclasses import dataclass, replace
from typing import Any

from services.gateway.chat_wire import ChatWire
from services.gateway.endpoints import ChatEndpoint, Prepared
from services.gateway.errors import ApiError, bad_field
from services.gateway.field_schema import but_for
from services.gateway.fields import Fields
from services.gateway.messages import ChatMessage
from services.gateway.params import check_model, same_json
from services.gateway.responses_input import read_input
from services.gateway.responses_tools import ToolFields, read_tool_fields
from services.gateway.responses_wire import Echo, ResponsesWire
from shared.randomness import Randomness

_OWN = frozenset(
    (
        *(
            "input",
            "instructions",
            "model",
            "text",
            "stream",
            "stream_options",
            "temperature",
            "top_p",
            "metadata",
            "user",
        ),
        *("max_output_tokens", "tools", "tool_choice", "parallel_tool_calls", "messages"),
    )
)
"""Fields that are read here. Others are parameters of chat completions (`seed`, `stop`, `top_k`, ...), or ignored."""
_OFF: tuple[Any, ...] = (False, 0, [], {}, "")
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "previous_response_id",
            "conversation",
            "store",
            "background",
            "prompt",
            "reasoning",
            "top_logprobs",
            "context_management",
        ),
        _OFF,
    ),
    "include": ([], ["reasoning.encrypted_content"]),  # reasoning is given in the clear
    "truncation": ("disabled",),
    **dict.fromkeys(("n", "best_of"), (1,)),  # there is one answer
    **dict.fromkeys(("logprobs", "prompt_logprobs", "echo"), (False,)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), ()),  # it is max_output_tokens
}
"""Field -> the values (beside null) with which it changes nothing."""
_MAX = 2**63 - 1
FORMAT_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
    "required": ["type"],
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, checked."""

    messages: list[ChatMessage]
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool
    format: dict[str, Any]
    tools: ToolFields
    echo: Echo
    more: dict[str, Any]  # parameters of chat completions

    def as_chat(self) -> dict[str, Any]:
        """The same as a request of chat completions."""
        chat: dict[str, Any] = {
            **self.more,
            "messages": self.messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "tools": self.tools.tools,
            "tool_choice": self.tools.choice,
            "parallel_tool_calls": self.echo.parallel_tool_calls,
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
        but_for(super().read_all, _OWN | REFUSED.keys())(fields)  # what is passed on to chat completions
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
        assert isinstance(prepared.wire, ChatWire)
        wire = ResponsesWire(response_id, created, self._parts.model_name, asked.echo, prepared.wire.shape)
        return replace(prepared, wire=wire)


def _in_our_words(error: ApiError) -> ApiError:
    """A refusal of chat completions names a field that the client has not sent."""
    names = {"messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}
    if not error.param:
        return error
    head, dot, rest = error.param.partition(".")
    if head == "response_format":
        error.param = "text.format"
    elif head.startswith("messages["):
        error.param = "input"
    else:
        error.param = names.get(head, head) + dot + rest.removeprefix("function.")
        error.message = error.message.replace("].function.", "].")
    return error


def _read(fields: Fields) -> _Asked:
    """:raises ApiError: 400 that names the first field which is wrong."""
    for name, value in fields.raw.items():
        harmless = REFUSED.get(name)
        if value is not None and harmless is not None and not any(same_json(value, other) for other in harmless):
            raise bad_field(name, f"{name} is not supported by this server's /v1/responses.", "unsupported")
    instructions = fields.text("instructions")
    max_output_tokens = fields.integer("max_output_tokens", 1, _MAX)
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1, above_low=True)
    stream = fields.boolean("stream")
    form, tools = _format(fields), read_tool_fields(fields)
    parallel = fields.boolean("parallel_tool_calls", default=True)
    echo = Echo(
        instructions=instructions,
        max_output_tokens=max_output_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        parallel_tool_calls=parallel,
        metadata=_metadata(fields),
        user=fields.text("user"),
        text_format=form,
        tools=fields.raw.get("tools") or [],
        tool_choice=fields.raw.get("tool_choice") or "auto",
    )
    messages = read_input(fields)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    more = {name: value for name, value in fields.raw.items() if name not in _OWN and name not in REFUSED}
    return _Asked(messages, max_output_tokens, temperature, top_p, stream, form, tools, echo, more)


def _metadata(fields: Fields) -> dict[str, Any]:
    value = fields.get("metadata", {"type": "object"})
    if value is not None and not isinstance(value, dict):
        raise bad_field("metadata", "metadata must be an object.")
    return value or {}


def _format(fields: Fields) -> dict[str, Any]:
    text = fields.object("text")
    if text is not None and text.get("verbosity", {"enum": ["medium"]}) not in (None, "medium"):
        raise bad_field("text.verbosity", "text.verbosity is not supported by this server.", "unsupported")
    value = None if text is None else text.get("format", FORMAT_SCHEMA)
    if value is None:
        return {"type": "text"}
    if not isinstance(value, dict) or value.get("type") not in FORMAT_SCHEMA["properties"]["type"]["enum"]:
        raise bad_field("text.format", "text.format must be an object with the type text, json_object or json_schema.")
    return value
