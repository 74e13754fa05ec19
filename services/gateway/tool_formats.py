"""How models write tool calls: what a forced call's grammar is, and which format a model has.

hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several after one another (Hermes, Qwen)
llama3_json  {"name": ..., "parameters": {...}}, perhaps after <|python_tag|> (Llama 3)
mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] (Mistral)
"""

import json
from dataclasses import dataclass
from typing import Literal

from services.gateway.errors import bad_field
from services.gateway.structured import GrammarAsk
from services.gateway.tools import ToolAsk
from shared.errors import GrammarError
from shared.grammar import json_body
from shared.tokenizer import Tokenizer

ToolFormatName = Literal["hermes", "llama3_json", "mistral"]
MAX_FORCED_CALLS = 16
"""Parallel calls that a grammar allows; without an end, a small model calls for ever."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`begin` opens a call (or the list of them), `end` closes it; `between` stands between calls."""

    name: ToolFormatName
    begin: str
    end: str
    between: str
    arguments: str  # the key
    is_list: bool = False
    parallel: bool = True
    bare: bool = False  # an answer may begin with a call, without `begin`: then only of a tool that is there


FORMATS = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments"),
    "llama3_json": ToolFormat("llama3_json", "<|python_tag|>", "", "; ", "parameters", parallel=False, bare=True),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "", ", ", "arguments", is_list=True),
}


def choose_format(configured: str, template: str) -> ToolFormat:
    """The configured format, or the one that the chat template shows; hermes, which Baton's own wording asks for, where
    it shows none."""
    if configured != "auto":
        return FORMATS[configured]
    for name in ("mistral", "hermes", "llama3_json"):
        if FORMATS[name].begin in template:
            return FORMATS[name]
    return FORMATS["llama3_json" if '"parameters": ' in template and "ipython" in template else "hermes"]


def forced_grammar(form: ToolFormat, ask: ToolAsk, tokenizer: Tokenizer) -> GrammarAsk:
    """A grammar of one call or more to `ask.forced`, and nothing else.

    :raises ApiError: 400, a tool's parameters are a schema that grammars would not hold to.
    """
    try:
        calls = [_call_rule(i, tool.name, tool.parameters, form.arguments) for i, tool in enumerate(ask.forced)]
    except GrammarError as exc:
        raise bad_field("tools", f"tools cannot be compiled: {exc}", "invalid_grammar") from None
    one = "call"
    if form.end:
        one = f'{_marker(form.begin, tokenizer)} "\\n" call "\\n" {_marker(form.end, tokenizer)}'
    more = f" ({_text(form.between)} one){{0,{MAX_FORCED_CALLS - 1}}}" if ask.parallel and form.parallel else ""
    start = f'{_marker(form.begin, tokenizer)} "[" one{more} "]"' if form.is_list else f"one{more}"
    rules = [f"start: {start}", f"one: {one}", "call: " + " | ".join(f"call_{i}" for i in range(len(calls))), *calls]
    return GrammarAsk("tools", "lark", "\n".join(rules) + "\n")


def _call_rule(index: int, name: str, parameters: object, key: str) -> str:
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    body = json.dumps(json_body(parameters if isinstance(parameters, dict) else {}), ensure_ascii=False)
    return f'call_{index}: {_text(head)} %json {body} "}}"'


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """As the special token that it is in this model's vocabulary, or else as text."""
    token_id = tokenizer.special_id(text)
    return _text(text) if token_id is None else f"<[{token_id}]>"


def _text(text: str) -> str:
    return json.dumps(text)
