"""From a chat's fields to a prompt, a grammar and the shape of its answer."""

from dataclasses import dataclass, replace

from services.gateway.answer import THINK, UNTHINK, AnswerShape
from services.gateway.chat_template import ChatTemplate, RenderOptions
from services.gateway.errors import bad_field
from services.gateway.fields import Fields
from services.gateway.messages import read_messages
from services.gateway.structured import GrammarAsk
from services.gateway.tool_formats import ToolFormat, choose_format, forced_grammar
from services.gateway.tools import read_tools
from shared.config import GatewayConfig
from shared.tokenizer import Tokenizer

_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a chat's client asked."""

    prompt: str
    grammar: GrammarAsk | None
    shape: AnswerShape


class ChatReader:
    """Knows the model: its template, and how it writes tool calls and reasoning. Immutable."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer, config: GatewayConfig) -> None:
        self._template, self._tokenizer = template, tokenizer
        source = "" if template is None else template.source
        self.tool_format: ToolFormat = choose_format(config.tool_parser, source)
        self._reasons = config.reasoning_parser == "think" or (
            config.reasoning_parser == "auto" and (THINK in source or UNTHINK in source)
        )

    def read(self, fields: Fields, grammar: GrammarAsk | None) -> Asked:
        """:param grammar: what the client asks of the whole answer.

        :raises ApiError: 400, a field is wrong, or the template refuses the messages.
        """
        if self._template is None:
            raise bad_field("messages", "The model has no chat template; use /v1/completions.", "unsupported")
        options, tools = read_options(fields), read_tools(fields)
        options = replace(options, tools=[tool.raw for tool in tools.tools])
        messages = read_messages(fields)
        if options.continue_final_message and messages[-1]["role"] != "assistant":
            raise bad_field("continue_final_message", "continue_final_message needs a last message of the assistant.")
        if tools.forced:
            if grammar is not None:
                raise bad_field("tool_choice", f"tool_choice forces a call; {grammar.field} asks for something else.")
            grammar = forced_grammar(self.tool_format, tools, self._tokenizer)
        prompt = self._template.render(messages, options)
        # An answer that follows a grammar has no room for thoughts; one that is gone on with may be past them.
        reasoning = self._reasons and grammar is None and not options.continue_final_message
        form = self._written() if tools.tools else None
        shape = AnswerShape(
            reasoning=reasoning,
            begins_thinking=reasoning and prompt.rstrip().endswith(THINK),
            tools=form,
            names=frozenset(tool.name for tool in tools.tools),
            parallel=tools.parallel,
        )
        return Asked(prompt, grammar, shape)

    def _written(self) -> ToolFormat:
        """The format as it is seen in text, where special tokens are not shown: calls without their marker."""
        form = self.tool_format
        return form if self._tokenizer.special_id(form.begin) is None else replace(form, bare=True)


def read_options(fields: Fields) -> RenderOptions:
    """All but the tools.

    :raises ApiError: 400 that names a field.
    """
    going_on = fields.boolean("continue_final_message")
    prompted = fields.boolean("add_generation_prompt")
    if going_on and prompted:
        raise bad_field("add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other.")
    variables = fields.object("chat_template_kwargs")
    for name in () if variables is None else variables.raw:
        if name in _OWN_VARIABLES:
            raise bad_field("chat_template_kwargs", f"chat_template_kwargs must not set {name}.")
    return RenderOptions(
        add_generation_prompt=not going_on and (prompted or fields.get("add_generation_prompt") is None),
        continue_final_message=going_on,
        variables={} if variables is None else variables.raw,
    )
