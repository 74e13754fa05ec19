"""`tools`, `tool_choice` and `parallel_tool_calls`, checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.errors import bad_field
from services.gateway.fields import Fields

MAX_TOOLS = 128
CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    raw: Mapping[str, Any]  # as the client wrote it, for the template


@dataclass(frozen=True, slots=True)
class ToolAsk:
    """The tools that may be called. `forced`: those of which one must be."""

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    parallel: bool = True


def read_tools(fields: Fields) -> ToolAsk:
    """Without tools, or with tool_choice none: an empty one.

    :raises ApiError: 400 that names the part which is wrong.
    """
    value = fields.get("tools", {"type": "array", "maxItems": MAX_TOOLS})
    choice = fields.get("tool_choice", CHOICE_SCHEMA)
    parallel = fields.boolean("parallel_tool_calls", default=True)
    if not value:
        if value not in (None, []):
            raise bad_field("tools", "tools must be a list.")
        if choice not in (None, "none", "auto"):
            raise bad_field("tool_choice", "tool_choice is allowed only with tools.")
        return ToolAsk()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise bad_field("tools", f"tools must be a list of at most {MAX_TOOLS} tools.")
    tools = tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(value))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_field("tools", "tools must have different names.")
    if choice == "none":
        return ToolAsk()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, Fields(choice, "tool_choice."))
    return ToolAsk(tools, _forced(tools, choice), parallel)


def _allowed(tools: tuple[Tool, ...], choice: Fields) -> tuple[tuple[Tool, ...], str]:
    """Some of the tools: the others are not shown to the model. Also the choice among them."""
    allowed = choice.object("allowed_tools")
    listed = None if allowed is None else allowed.get("tools")
    mode = None if allowed is None else allowed.get("mode")
    if not isinstance(listed, list) or not all(isinstance(t, dict) for t in listed) or mode not in ("auto", "required"):
        raise bad_field("tool_choice", "tool_choice.allowed_tools must have a mode, auto or required, and tools.")
    named = {tool.name for item in listed for tool in _forced(tools, item)}
    if not named:
        raise bad_field("tool_choice", "tool_choice.allowed_tools.tools is empty.")
    return tuple(tool for tool in tools if tool.name in named), mode


def _tool(value: Any, where: str) -> Tool:
    outer = Fields(value if isinstance(value, dict) else {}, where + ".")
    if outer.get("type") != "function":
        raise bad_field(outer.path("type"), f"{outer.path('type')} must be 'function'.", "unsupported")
    function = outer.object("function")
    if function is None:
        raise bad_field(outer.path("function"), f"{outer.path('function')} is missing.")
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        path = function.path("name")
        raise bad_field(path, f"{path} must be 1 to 64 letters, digits, dots, underscores or dashes.")
    function.text("description")
    parameters = function.object("parameters")
    return Tool(name, {"type": "object", "properties": {}} if parameters is None else parameters.raw, value)


def _forced(tools: tuple[Tool, ...], choice: Any) -> tuple[Tool, ...]:
    if choice in (None, "auto"):
        return ()
    if choice == "required":
        return tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        raise bad_field("tool_choice", "tool_choice must be none, auto, required, or name a function.")
    for tool in tools:
        if tool.name == function.get("name"):
            return (tool,)
    raise bad_field("tool_choice", "tool_choice names a function that is not in tools.")
