"""The model's own chat template, rendered as Hugging Face does, in a sandbox.

See "Templates" in the transformers documentation for the functions that templates may call.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.errors import ApiError, bad_field
from services.gateway.messages import ChatMessage
from services.gateway.tool_prompt import without_tools
from shared.clock import Clock
from shared.errors import ConfigError, ModelError
from shared.tokenizer import Tokenizer

_END = "BATON-CONTINUES-HERE "
"""Put behind the message to continue, and looked for in the prompt: what follows it there is cut off."""
_MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What a client may ask of a template."""

    tools: Sequence[Mapping[str, Any]] = ()  # as OpenAI has them
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`


class ChatTemplate:
    """A compiled template. Rendering is pure except for the date that some templates print."""

    def __init__(
        self, source: str, template_tokens: Mapping[str, str], clock: Clock, tool_source: str | None = None
    ) -> None:
        """:param tool_source: a template of its own for requests with tools, where the model has one.

        :raises ModelError: the template is not valid jinja.
        """
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.fromtimestamp(clock.wall()).strftime(form)
        try:
            self._template = env.from_string(source)
            self._tool_template = self._template if tool_source is None else env.from_string(tool_source)
        except jinja2.TemplateError as exc:
            raise ModelError(f"the model's chat template is not valid: {exc}") from None
        self._tokens = dict(template_tokens)
        self._knows_developer = "developer" in source
        self.source = source if tool_source is None else tool_source
        self.knows_tools = "tools" in self.source
        self._takes_system = self._shows_system()

    def render(self, messages: Sequence[ChatMessage], options: RenderOptions | None = None) -> str:
        """The prompt, up to where the assistant's answer begins.

        :raises ApiError: 400, the template refuses these messages (for example: roles must alternate).
        """
        options = options or RenderOptions()
        if not self.knows_tools:
            messages, options = self._put_into_words(messages, options)
        if not self._knows_developer:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if not options.continue_final_message:
            return self._render(messages, options)
        last = messages[-1]
        rendered = self._render([*messages[:-1], last | {"content": last["content"] + _END}], options)
        at = rendered.rfind(_END.strip())
        if at < 0 or last["content"].strip() not in rendered:
            raise bad_field("continue_final_message", "The model's chat template changes the message to continue.")
        kept = rendered[:at]
        return kept if rendered.startswith(_END, at) else kept.rstrip()

    def _put_into_words(
        self, messages: Sequence[ChatMessage], options: RenderOptions
    ) -> tuple[Sequence[ChatMessage], RenderOptions]:
        """For a template that knows no tools."""
        worded = without_tools(messages, options.tools, takes_system=self._takes_system)
        return worded, RenderOptions(
            (), options.add_generation_prompt, options.continue_final_message, options.variables
        )

    def _shows_system(self) -> bool:
        """Whether a system message reaches the prompt: some templates refuse them, some pass them over."""
        try:
            return "BATON-SYSTEM" in self._render(
                [{"role": "system", "content": "BATON-SYSTEM"}, {"role": "user", "content": "x"}], RenderOptions()
            )
        except ApiError:
            return False

    def _render(self, messages: Sequence[ChatMessage], options: RenderOptions) -> str:
        variables: dict[str, Any] = {**self._tokens, **options.variables}
        variables |= {
            "messages": messages,
            "tools": list(options.tools) or None,
            "documents": None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            return (self._tool_template if options.tools else self._template).render(variables)
        except _Refused as exc:
            raise bad_field("messages", f"The model's chat template refuses the messages: {exc}") from None
        except Exception as exc:  # the template is the model's, not ours: it can fail in any way
            raise _unfit(exc) from exc


def load_template(tokenizer: Tokenizer, path: str, clock: Clock) -> ChatTemplate | None:
    """The template of a file, if `path` names one, else the model's own; None: it has none.

    :raises ConfigError: the file cannot be read.
    :raises ModelError: the template is not valid.
    """
    if path:
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"configuration: gateway.chat_template {path}: {exc}") from None
        return ChatTemplate(source, tokenizer.template_tokens, clock)
    if tokenizer.chat_template is None:
        return None
    return ChatTemplate(tokenizer.chat_template, tokenizer.template_tokens, clock, tokenizer.tool_chat_template)


def _unfit(exc: Exception) -> ApiError:
    reason = f"{type(exc).__name__}: {exc}"[:_MAX_REASON]
    return bad_field("messages", f"The model's chat template cannot render the messages ({reason}).")


class _Refused(jinja2.TemplateError):
    pass


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's part for training; here it is only shown."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
