"""The tools of `/v1/responses`, which are flat, as chat completions write them, where functions are checked."""

from dataclasses import dataclass
from typing import Any

from services.gateway.errors import bad_field
from services.gateway.fields import Fields
from services.gateway.tools import CHOICE_SCHEMA, MAX_TOOLS

TOOLS_SCHEMA = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
        "required": ["type", "name"],
    },
}


@dataclass(frozen=True, slots=True)
class ToolFields:
    """`tools` and `tool_choice` of a chat."""

    tools: list[dict[str, Any]]
    choice: Any


def read_tool_fields(fields: Fields) -> ToolFields:
    """:raises ApiError: 400, a tool is not a function of the client's."""
    value, choice = fields.get("tools", TOOLS_SCHEMA), fields.get("tool_choice", CHOICE_SCHEMA)
    if value is not None and not isinstance(value, list):
        raise bad_field("tools", "tools must be a list.")
    return ToolFields([_tool(tool, f"tools[{i}].type") for i, tool in enumerate(value or ())], _choice(choice))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_field(where, f"{where} must be 'function': this server has no tools of its own.", "unsupported")
    return _nested(tool, ("name", "description", "parameters", "strict"))


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return _nested(choice, ("name",))
    if choice.get("type") != "allowed_tools":
        raise bad_field("tool_choice", "tool_choice must be none, auto, required, or name functions.", "unsupported")
    listed = choice.get("tools")
    if not isinstance(listed, list):
        raise bad_field("tool_choice", "tool_choice.tools must be a list.")
    tools = [_nested(tool, ("name",)) if isinstance(tool, dict) else tool for tool in listed]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _nested(value: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {"type": value.get("type"), "function": {name: value[name] for name in names if name in value}}
