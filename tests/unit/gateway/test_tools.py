"""Tools through the endpoint: prompts, forced grammars, answers streamed and not, and refusals."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.fields import Fields
from services.gateway.tool_formats import FORMATS, choose_format, forced_grammar
from services.gateway.tools import ToolAsk, read_tools
from shared.errors import GrammarError
from shared.grammar import Vocabulary, to_grammar
from shared.tokenizer import Tokenizer
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import answer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"type": "string", "maxLength": 12}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def ask(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(CHAT, json={"messages": USER, **body})


async def test_a_call_in_the_answer_becomes_tool_calls(gateway: Gateway):
    """Content, the call with its id, and the finish reason tool_calls."""
    gateway.port.script = answer(gateway.ids(CALL), reason="stop")
    async with gateway.client() as client:
        body = (await ask(client, tools=[WEATHER, TIME])).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


async def test_a_streamed_call_comes_as_openai_sends_it(gateway: Gateway):
    """The id and the name first, then the arguments in pieces, then the reason with an empty delta."""
    gateway.port.script = answer(gateway.ids(CALL), reason="stop")
    async with gateway.client() as client:
        response = await ask(client, tools=[WEATHER], stream=True)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line]
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert calls[0]["id"].startswith("call_")
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert len(calls) > 2
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'
    assert events[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}


async def test_parallel_calls_of_a_model_that_may_choose_reach_the_client(gateway: Gateway):
    """`tool_choice: auto`: OpenAI's client finds both calls, each with arguments of its own, whole and streamed."""
    called = CALL + '\n<tool_call>\n{"name": "time", "arguments": {"zone": "utc"}}\n</tool_call>'
    gateway.port.script = answer(gateway.ids(called), reason="stop")
    asked: Any = {"model": "smol", "messages": USER, "tools": [WEATHER, TIME], "tool_choice": "auto"}
    url = "http://127.0.0.1:{}/v1"
    async with gateway.server() as port, openai.AsyncOpenAI(base_url=url.format(port), api_key="none") as client:
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
    want = [("weather", '{"city": "Rome"}'), ("time", '{"zone": "utc"}')]
    for message in (whole.choices[0].message, final.choices[0].message):
        calls: Any = message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == want
        assert len({call.id for call in calls}) == 2
        assert message.content == "Let me see."
    assert [e.type for e in events].count("tool_calls.function.arguments.done") == 2


async def test_without_parallel_calls_the_client_gets_the_first_alone(gateway: Gateway):
    """`parallel_tool_calls: false` with `tool_choice: auto`: chats and responses, whole and streamed."""
    called = CALL + '\n<tool_call>\n{"name": "time", "arguments": {"zone": "utc"}}\n</tool_call>'
    gateway.port.script = answer(gateway.ids(called), reason="stop")
    asked: Any = {"model": "smol", "parallel_tool_calls": False}
    chat: Any = asked | {"messages": USER, "tools": [WEATHER, TIME]}
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    response: Any = asked | {"input": "weather in Rome?", "tools": flat}
    url = "http://127.0.0.1:{}/v1"
    async with gateway.server() as port, openai.AsyncOpenAI(base_url=url.format(port), api_key="none") as client:
        whole = await client.chat.completions.create(**chat)
        async with client.chat.completions.stream(**chat) as stream:
            streamed = await stream.get_final_completion()
        answered = await client.responses.create(**response)
        async with client.responses.stream(**response) as stream:
            told = await stream.get_final_response()
    for choice in (whole.choices[0], streamed.choices[0]):
        (call,) = choice.message.tool_calls or ()
        made: Any = call
        assert (made.function.name, made.function.arguments) == ("weather", '{"city": "Rome"}')
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    for one in (answered, told):
        assert [item.type for item in one.output] == ["message", "function_call"]
        assert one.output_text == "Let me see."


async def test_a_tool_whose_schema_would_be_broken_cannot_be_forced(gateway: Gateway):
    """A 400 with the reason; where the model may choose, nothing is promised, and it is let in."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maxProperties": 3}}}
    gateway.port.script = answer(gateway.ids("x"))
    async with gateway.client() as client:
        response = await ask(client, tools=[tool], tool_choice="required")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert "maxProperties" in response.json()["error"]["message"]
        assert (await ask(client, tools=[tool])).status_code == 200


async def test_an_answer_without_a_call_is_plain_text(gateway: Gateway):
    """With tools that were not used, and with tool_choice none."""
    async with gateway.client() as client:
        gateway.port.script = answer(gateway.ids("No idea."), reason="stop")
        for body in ({"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
            (choice,) = (await ask(client, **body)).json()["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == "No idea."
            assert "tool_calls" not in choice["message"]
        gateway.port.script = answer(gateway.ids(CALL), reason="stop")
        (choice,) = (await ask(client, tools=[WEATHER], tool_choice="none")).json()["choices"]
        assert choice["message"]["content"] == CALL


async def test_tools_are_put_into_words_for_a_template_without_them(gateway: Gateway):
    """SmolLM2's template knows no tools: they stand in the system message, calls and results in the others."""
    gateway.port.script = answer(gateway.ids("ok"), reason="stop")
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    async with gateway.client() as client:
        response = await client.post(CHAT, json={"messages": messages, "tools": [WEATHER]})
    assert response.status_code == 200, response.text
    ids = list(gateway.port.admitted[-1].token_ids)
    prompt = gateway.tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\n# Tools")
    assert json.dumps(WEATHER) in prompt
    assert '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\n12:00\n</tool_response>" in prompt


async def test_a_forced_call_is_forced_by_a_grammar(gateway: Gateway, tokenizer: Tokenizer):
    """required allows each tool, a named choice that one; each alone, unless calls may be parallel."""
    vocabulary = Vocabulary(tokenizer)
    gateway.port.script = answer(gateway.ids("x"))
    rome = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    clock = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    named = {"type": "function", "function": {"name": "weather"}}
    cases: list[tuple[dict[str, Any], list[str], list[str]]] = [
        (
            {"tool_choice": "required"},
            [rome, clock, f"{rome}\n{clock}"],
            ["hello", rome[:-3], rome.replace("Rome", "R" * 13)],
        ),
        ({"tool_choice": named, "parallel_tool_calls": False}, [rome], [clock, f"{rome}\n{rome}"]),
    ]
    async with gateway.client() as client:
        for fields, good, bad in cases:
            response = await ask(client, tools=[WEATHER, TIME], **fields)
            assert response.status_code == 200, response.text
            grammar = gateway.port.admitted[-1].sampling.grammar
            for text in good:
                assert follows(vocabulary, grammar, gateway.ids(text)), text
            for text in bad:
                assert not follows(vocabulary, grammar, gateway.ids(text)), text


def follows(vocabulary: Vocabulary, grammar: str, token_ids: list[int]) -> bool:
    matcher = vocabulary.matcher(grammar)
    try:
        matcher.advance(token_ids)
    except GrammarError:
        return False
    return matcher.accepts


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Rome"}}'),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]',
        ),
    ],
)
def test_every_format_has_a_grammar(tokenizer: Tokenizer, form: str, text: str):
    """What the grammar allows is what the parser reads."""
    asked = read_tools(Fields({"tools": [WEATHER, TIME], "tool_choice": "required"}))
    grammar = forced_grammar(FORMATS[form], asked, tokenizer)
    vocabulary = Vocabulary(tokenizer)
    assert follows(vocabulary, to_grammar(grammar.kind, grammar.text), tokenizer.encode(text, add_special_tokens=False))
    assert not follows(
        vocabulary, to_grammar(grammar.kind, grammar.text), tokenizer.encode("{", add_special_tokens=False)
    )


def test_a_marker_that_is_a_special_token_is_one_in_the_grammar(tokenizer: Tokenizer):
    """Mistral's [TOOL_CALLS] is; its text alone would not be allowed by the model's own habits."""
    from dataclasses import replace

    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["[TOOL_CALLS]"])
    special = replace(tokenizer, backend=backend)
    asked = ToolAsk(*[read_tools(Fields({"tools": [TIME], "tool_choice": "required"})).tools] * 2)
    ask = forced_grammar(FORMATS["mistral"], asked, special)
    ids = special.encode('[TOOL_CALLS][{"name": "time", "arguments": {}}]', add_special_tokens=False)
    assert ids[0] == special.special_id("[TOOL_CALLS]")
    assert follows(Vocabulary(special), to_grammar(ask.kind, ask.text), ids)


def test_the_format_is_seen_in_the_template():
    """Or configured; hermes where nothing is to be seen."""
    assert choose_format("auto", "... [TOOL_CALLS] ...").name == "mistral"
    assert choose_format("auto", "{{ '<tool_call>' }}").name == "hermes"
    assert choose_format("auto", "<|python_tag|>").name == "llama3_json"
    assert choose_format("auto", "").name == "hermes"
    assert choose_format("mistral", "<tool_call>").name == "mistral"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [TIME], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TIME], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": [TIME], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


async def test_what_is_wrong_with_tools_is_named(gateway: Gateway):
    """A 400 on the very field, and nothing is queued."""
    async with gateway.client() as client:
        for fields, param in BAD:
            response = await ask(client, **fields)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"] == param, fields
    assert not gateway.port.admitted


async def test_completions_refuse_what_is_for_chats(gateway: Gateway):
    """Rather than answer as if it had not been asked."""
    async with gateway.client() as client:
        for fields in ({"tools": [TIME]}, {"tool_choice": "required"}, {"continue_final_message": True}):
            response = await client.post("/v1/completions", json={"prompt": "x", **fields})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(fields))


async def test_reasoning_is_a_field_of_its_own(gateway: Gateway, tokenizer: Tokenizer, tmp_path: Path):
    """Streamed and not, for a model whose template knows <think>."""
    from services.gateway.answer import AnswerShape
    from services.gateway.answers import Answer
    from services.gateway.chat_wire import ChatWire
    from services.gateway.generation import Delta, Usage

    wire = ChatWire("id", 0, "m", False, AnswerShape(reasoning=True))
    answer = Answer(0, parts=["<think>\nwhy\n</think>\n\nbecause"], counts=[9], reason="stop")
    body = json.loads(wire.whole([answer], Usage(1, 2, 0)))
    assert body["choices"][0]["message"]["reasoning_content"] == "\nwhy\n"
    assert body["choices"][0]["message"]["content"] == "because"
    text = b"".join(wire.chunk(Delta(0, part)) for part in ("<thi", "nk>why</", "think>be", "cause"))
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.decode().split("\n\n") if line]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "why"
    assert "".join(d.get("content", "") for d in deltas) == "because"
