"""Functions through `/v1/responses`: calls out, their results in, streamed and not, by OpenAI's own client."""

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.unit.gateway.conftest import Gateway, client_of
from tests.unit.gateway.fakes import answer

pytestmark = pytest.mark.anyio
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TIME: Any = {"type": "function", "name": "time", "parameters": {}, "strict": False}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
MADE = [("weather", '{"city": "Rome"}'), ("time", "{}")]
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    *["response.output_item.added", "response.function_call_arguments.delta"],
    *["response.function_call_arguments.done", "response.output_item.done"],
    *["response.output_item.added", "response.function_call_arguments.delta"],
    *["response.function_call_arguments.done", "response.output_item.done"],
    "response.completed",
]


def calls_of(response: Response) -> list[ResponseFunctionToolCall]:
    return [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]


def prompt_of(gateway: Gateway) -> str:
    return gateway.tokenizer.backend.decode(list(gateway.port.admitted[-1].token_ids), skip_special_tokens=False)


async def test_calls_are_items_streamed_or_not(gateway: Gateway):
    """A message and two calls, in the order of the answer; the stream's last event has the same items."""
    gateway.port.script = answer(gateway.ids(CALLS), reason="stop")
    asked: Any = {"model": "smol", "input": "weather in Rome?", "tools": [WEATHER, TIME]}
    async with gateway.server() as port, client_of(port) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output_text == "Let me see."
    assert [(call.name, call.arguments) for call in calls_of(whole)] == MADE
    assert all(item.status == "completed" for item in calls_of(whole))
    assert len({item.id for item in whole.output}) == len({c.call_id for c in calls_of(whole)}) + 1 == 3
    assert [tool.type for tool in whole.tools] == ["function", "function"]
    assert (whole.tool_choice, whole.parallel_tool_calls, whole.status) == ("auto", True, "completed")
    assert [(item.type, getattr(item, "arguments", None)) for item in final.output] == [
        (item.type, getattr(item, "arguments", None)) for item in whole.output
    ]
    assert events[-1].type == "response.completed"


async def test_a_streamed_call_comes_in_typed_events(gateway: Gateway):
    """In OpenAI's order, numbered; deltas are the arguments in pieces; each item is done before the next begins."""
    gateway.port.script = answer(gateway.ids(CALLS), reason="stop")
    async with gateway.server() as port, client_of(port) as client:
        stream = await client.responses.create(model="smol", input="hi", tools=[WEATHER, TIME], stream=True)
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    merged = [kind for i, kind in enumerate(kinds) if not (i and kind == kinds[i - 1] and kind.endswith("delta"))]
    assert merged == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = ["", ""]
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            pieces[event.output_index - 1] += event.delta
        if event.type == "response.output_item.added" and event.item.type == "function_call":
            assert (event.item.arguments, event.item.status) == ("", "in_progress")
        if event.type == "response.output_item.done" and event.item.type == "function_call":
            assert event.item.arguments == pieces[event.output_index - 1]
    assert pieces == [arguments for _, arguments in MADE]
    assert kinds.count("response.function_call_arguments.delta") > 3


async def test_a_conversation_with_calls_is_the_chats(gateway: Gateway):
    """The output of a response and what its calls gave, sent again: the very prompt of the same chat."""
    gateway.port.script = answer(gateway.ids(CALLS), reason="stop")
    question = {"role": "user", "content": "weather in Rome?"}
    async with gateway.server() as port, client_of(port) as client:
        first = await client.responses.create(model="smol", input=[question], tools=[WEATHER, TIME])
        results = [("sunny", calls_of(first)[0]), ([{"type": "input_text", "text": "noon"}], calls_of(first)[1])]
        items: list[Any] = [question, *(item.model_dump(exclude_none=True) for item in first.output)]
        items += [{"type": "function_call_output", "call_id": c.call_id, "output": text} for text, c in results]
        await client.responses.create(model="smol", input=items, tools=[WEATHER, TIME])
        by_responses = gateway.port.admitted[-1].token_ids
        calls: Any = [
            {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls_of(first)
        ]
        messages: Any = [question, {"role": "assistant", "content": "Let me see.", "tool_calls": calls}]
        messages += [
            {"role": "tool", "tool_call_id": call.call_id, "content": text}
            for text, call in zip(("sunny", "noon"), calls_of(first), strict=True)
        ]
        tools = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in (WEATHER, TIME)
        ]
        await client.chat.completions.create(model="smol", messages=messages, tools=tools)  # type: ignore[arg-type]
    assert by_responses == gateway.port.admitted[-1].token_ids
    assert "sunny" in prompt_of(gateway)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "time"}),
        ({"type": "function", "name": "time"}, {"time"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            {"weather"},
        ),
    ],
)
async def test_a_forced_call_has_the_grammar_of_its_tools(gateway: Gateway, choice: Any, names: set[str]):
    """And the response says what was chosen."""
    gateway.port.script = answer(gateway.ids("x"))
    async with gateway.client() as client:
        body = {"input": "hi", "tools": [WEATHER, TIME], "tool_choice": choice}
        response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    grammar = gateway.port.admitted[0].sampling.grammar
    assert {name for name in ("weather", "time") if f'\\"{name}\\"' in grammar.replace('\\\\"', '\\"')} == names
    assert response.json()["tool_choice"] == choice


async def test_allowed_tools_are_all_that_the_model_sees(gateway: Gateway):
    """With mode auto: another tool is not in the prompt, and nothing is forced; in chat completions too."""
    gateway.port.script = answer(gateway.ids("x"))
    allowed = [{"type": "function", "name": "time"}]
    nested = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in (WEATHER, TIME)]
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": nested,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": nested[1:]}},
    }
    answers = {"input": "hi", "tools": [WEATHER, TIME]}
    answers["tool_choice"] = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    async with gateway.client() as client:
        for path, body in (("/v1/responses", answers), ("/v1/chat/completions", chat)):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert '"time"' in prompt_of(gateway)
            assert "weather" not in prompt_of(gateway)
            assert not gateway.port.admitted[-1].sampling.grammar


async def test_a_call_that_is_cut_is_incomplete(gateway: Gateway):
    """So is the response; what there is of the arguments is told."""
    gateway.port.script = answer(gateway.ids(CALLS))
    limit = len(gateway.ids(CALLS[: CALLS.index("Rome")]))
    async with gateway.server() as port, client_of(port) as client:
        response = await client.responses.create(model="smol", input="hi", tools=[WEATHER], max_output_tokens=limit)
    (call,) = calls_of(response)
    assert (response.status, call.status, call.name) == ("incomplete", "incomplete", "weather")
    assert '{"city": "Rome"}'.startswith(call.arguments)


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post("/v1/responses", json={"input": "hi", **body})


CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [3]}, "tools[0].type"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": ["required"]}}, "tool_choice"),
        ({"input": [CALL | {"arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [CALL | {"name": None}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]}, "input[0].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c1", "output": 3}]}, "input[1].output"),
        ({"input": [CALL] * 129}, "input"),
        ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
    ],
)
async def test_what_is_wrong_with_tools_is_named_as_the_client_wrote_it(
    gateway: Gateway, body: dict[str, Any], named: str
):
    """And nothing is admitted."""
    async with gateway.client() as client:
        response = await ask(client, body)
    assert response.status_code == 400
    assert json.loads(response.text)["error"]["param"] == named
    assert not gateway.port.admitted
