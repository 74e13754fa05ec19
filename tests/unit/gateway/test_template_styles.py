"""Chat templates in the style of each family, rendered as transformers renders them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.chat_template import ChatTemplate, RenderOptions, load_template
from services.gateway.errors import ApiError
from shared.clock import ManualClock
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

HEADERS = """{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

INST = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' and message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}{{ call.function | tojson }}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}[TOOL_RESULTS] {{ {"content": message.content} | tojson }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

STYLES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "turns": TURNS}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
TALK = [
    {"role": "user", "content": ' What is <b> & "c"? '},
    {"role": "assistant", "content": "Bold, 漢."},
    {"role": "user", "content": "and now?"},
]
CALLED = [
    {"role": "user", "content": "time?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "time", "arguments": {"zone": "é", "n": [1, None]}}}],
    },
    {"role": "tool", "content": "12:00"},
]
TOOLS = [{"type": "function", "function": {"name": "time", "description": "<it>", "parameters": {"type": "object"}}}]


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **TOKENS, **options)
    return rendered[0]


def ours(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENS, ManualClock(0.0))


def outcome(render: Callable[[], str]) -> str | Exception:
    try:
        return render()
    except Exception as exc:
        return exc


@pytest.fixture
def same_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' clock is the machine's: both print the year only."""
    monkeypatch.setitem(STYLES, "headers", HEADERS.replace("%d %b %Y", "%%"))


CONVERSATIONS = {"talk": TALK, "system": [SYSTEM, *TALK], "one": TALK[:1]}


@pytest.mark.usefixtures("same_day")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=list(CONVERSATIONS))
@pytest.mark.parametrize("prompted", [True, False])
def test_conversations_render_as_in_transformers(style: str, messages: list[dict[str, Any]], prompted: bool):
    """With and without a system message and the generation prompt; what the template refuses is a 400 in its words."""
    want, got = (
        outcome(lambda: by_transformers(STYLES[style], messages, add_generation_prompt=prompted)),
        outcome(lambda: ours(STYLES[style]).render(messages, RenderOptions(add_generation_prompt=prompted))),
    )
    if isinstance(want, str):
        assert got == want
    else:
        assert isinstance(got, ApiError)
        assert got.status == 400
        assert str(want) in got.message


@pytest.mark.usefixtures("same_day")
@pytest.mark.parametrize("style", ["chatml", "headers", "inst"])
def test_tools_and_their_results_render_as_in_transformers(style: str):
    """Tools offered, called and answered, by the model's own template."""
    source = STYLES[style]
    want = by_transformers(source, CALLED, tools=TOOLS, add_generation_prompt=True)
    assert ours(source).render(CALLED, RenderOptions(tools=TOOLS)) == want
    assert '"zone": "é"' in want


@pytest.mark.usefixtures("same_day")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", ["The answer is", "The answer is ", "a\n\n", "</s> x"])
def test_an_answer_is_continued_as_in_transformers(style: str, text: str):
    """The prompt ends where the last message ends; nothing that closes it follows."""
    source, messages = STYLES[style], [*TALK, {"role": "assistant", "content": text}]
    want = by_transformers(source, messages, continue_final_message=True)
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    assert ours(source).render(messages, options) == want
    assert want.rstrip().endswith(text.strip())


def test_a_template_that_drops_the_last_message_cannot_continue_it():
    """A 400 that says so."""
    with pytest.raises(ApiError, match="changes the message") as refusal:
        ours("{{ messages[0].content }}").render(
            [*TALK, {"role": "assistant", "content": "x"}], RenderOptions(continue_final_message=True)
        )
    assert refusal.value.param == "continue_final_message"


def test_template_kwargs_reach_the_template():
    """Qwen3's enable_thinking, for one."""
    for thinking in (True, False):
        want = by_transformers(CHATML, TALK, add_generation_prompt=True, enable_thinking=thinking)
        assert ours(CHATML).render(TALK, RenderOptions(variables={"enable_thinking": thinking})) == want


def test_a_template_error_says_why():
    """The kind of error and its words, which are the template's."""
    with pytest.raises(ApiError, match=r"UndefinedError: .*has no attribute"):
        ours("{{ messages[0].nothing.at_all }}").render(TALK)


def test_a_template_of_its_own_for_tools_is_taken_where_there_are_tools():
    """`tool_use` among the named templates."""
    both = ChatTemplate("plain", TOKENS, ManualClock(0.0), "with {{ tools | length }}")
    assert both.render(TALK) == "plain"
    assert both.render(TALK, RenderOptions(tools=TOOLS)) == "with 1"


def test_a_configured_file_wins(tokenizer: Tokenizer, tmp_path: Path):
    """gateway.chat_template; one that is not there stops the boot."""
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ messages[0].content }}")
    template = load_template(tokenizer, str(file), ManualClock(0.0))
    assert template is not None
    assert template.render(TALK[2:]) == "mine and now?"
    with pytest.raises(ConfigError, match="nothere"):
        load_template(tokenizer, str(tmp_path / "nothere"), ManualClock(0.0))


def test_developer_is_system_where_the_template_does_not_know_it():
    """OpenAI's newer name of the role."""
    messages = [{"role": "developer", "content": "d"}, *TALK]
    assert "<|im_start|>system\nd<|im_end|>" in ours(CHATML).render(messages)


def test_tools_in_words_reach_a_template_without_system_messages():
    """In front of the first message; the results of one turn are one message, as roles must alternate."""
    call = {"name": "time", "arguments": {}}
    results = [{"role": "tool", "content": text, "tool_call_id": text} for text in ("noon", "night")]
    asked = {"role": "assistant", "content": "", "tool_calls": [{"function": call}, {"function": call}]}
    prompt = ours(TURNS).render([TALK[0], asked, *results], RenderOptions(tools=TOOLS))
    turns = prompt.split("<start_of_turn>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == ["user", "model", "user", "model"]
    assert turns[0].startswith("user\n# Tools")
    assert turns[0].split("</tool_call>")[-1].strip() == TALK[0]["content"].strip() + "<end_of_turn>"
    assert turns[1].count("<tool_call>") == 2
    assert turns[2].count("</tool_response>") == 2
    assert turns[2].index("noon") < turns[2].index("night")
