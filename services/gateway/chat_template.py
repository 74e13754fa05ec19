"""The model's own chat template, rendered as Hugging Face does, in a sandbox.

See "Templates" in the transformers documentation for the functions that templates may call.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.errors import ApiError, bad_field
from shared.clock import Clock
from shared.errors import ModelError


class ChatTemplate:
    """A compiled template. Rendering is pure except for the date that some templates print."""

    def __init__(self, source: str, template_tokens: Mapping[str, str], clock: Clock) -> None:
        """:raises ModelError: the template is not valid jinja."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.fromtimestamp(clock.wall()).strftime(form)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as exc:
            raise ModelError(f"the model's chat template is not valid: {exc}") from None
        self._tokens = dict(template_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt, up to where the assistant's answer begins.

        :raises ApiError: 400, the template refuses these messages (for example: roles must alternate).
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except _Refused as exc:
            raise bad_field("messages", f"The model's chat template refuses the messages: {exc}") from None
        except Exception as exc:  # the template is the model's, not ours: it can fail in any way
            raise _unfit(exc) from exc


def _unfit(exc: Exception) -> ApiError:
    return bad_field("messages", f"The model's chat template cannot render the messages ({type(exc).__name__}).")


class _Refused(jinja2.TemplateError):
    pass


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja's own, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's part for training; here it is only shown."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
