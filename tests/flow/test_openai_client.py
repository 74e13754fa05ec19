"""The whole surface of the `openai` client that a server of text can have, on one stack: what it sends is understood,
what it gets becomes its own types, its exceptions and its parsed objects."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import anyio
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.streaming.chat import ContentDoneEvent, FunctionToolCallArgumentsDoneEvent
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel, Field

from tests.flow.stack import Stack
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.anyio, pytest.mark.flow]
USER: Any = [{"role": "user", "content": "What is gravity?"}]
GREEDY: Any = {"model": "default", "temperature": 0}


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=6)
    unit: Literal["celsius", "fahrenheit"]


class Clock(BaseModel):
    """The time of a zone."""

    zone: Literal["utc", "local"]


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]
MODELS: dict[str, type[BaseModel]] = {"Weather": Weather, "Clock": Clock}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A tiny model with room for tools in its prompt: its tokens are mostly single characters."""
    model = make_tiny_llama(tmp_path_factory.mktemp("client") / "tiny", max_context=8192)
    with Stack(prefill=1, decode=1, model__path=model, engine__num_blocks=2000) as stack:
        yield stack


@pytest.fixture
def client(pair: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    pair.wait_idle()


@pytest.fixture
async def aclient(pair: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    pair.wait_idle()


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    """By iteration, by name, by `default`; an unknown one is the client's NotFoundError."""
    (model,) = list(client.models.list())
    assert client.models.retrieve(model.id) == model
    assert client.models.retrieve("default").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-none")
    assert caught.value.code == "model_not_found"


async def test_chats_say_the_same_in_every_way_to_ask(client: OpenAI, aclient: AsyncOpenAI) -> None:
    """Whole, streamed, by the streaming helper, raw; synchronous and not."""
    asked: Any = {**GREEDY, "messages": USER, "max_completion_tokens": 40, "logprobs": True, "top_logprobs": 2}
    asked["stop"] = (client.chat.completions.create(**asked).choices[0].message.content or "")[15:18]
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens

    parts = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == text
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        assert any(event.type == "content.delta" for event in stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.usage is not None
    assert whole.usage.completion_tokens == final.usage.completion_tokens
    raw = client.chat.completions.with_raw_response.create(**asked, extra_headers={"x-request-id": "mine-7"})
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().choices[0].message.content == text
    with client.chat.completions.with_streaming_response.create(**asked) as response:
        assert json.loads(response.read())["choices"][0]["message"]["content"] == text

    again = await aclient.chat.completions.create(**asked)
    assert again.choices[0].message.content == text
    async with aclient.chat.completions.stream(**asked) as helper:
        assert (await helper.get_final_completion()).choices[0].message.content == text


async def test_completions_echo_and_stream(client: OpenAI, aclient: AsyncOpenAI) -> None:
    """Echoed text and logprobs of prompt and answer; the pieces of a stream add up to it."""
    asked: Any = {**GREEDY, "prompt": "the ship and the storm", "max_tokens": 6, "echo": True, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0]
    assert whole.text.startswith("the ship and the storm")
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs is not None
    assert whole.logprobs.token_logprobs[0] is None
    assert (
        len(whole.logprobs.tokens or []) == len(whole.logprobs.token_logprobs) == len(whole.logprobs.top_logprobs or [])
    )
    assert "".join(whole.logprobs.tokens or []).startswith("the ship and the storm")
    parts = [chunk.choices[0] async for chunk in await aclient.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == whole.text


def check_calls(calls: list[Any] | None) -> int:
    """Their arguments are of the client's models, parsed by the client; how many there are."""
    for call in calls or ():
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert call.id.startswith("call_")
        parsed = getattr(call.function, "parsed_arguments", None)
        assert type(parsed) is MODELS[call.function.name]
        assert parsed == MODELS[call.function.name].model_validate_json(call.function.arguments)
    return len(calls or ())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Clock"}}])
async def test_forced_calls_are_parsed_by_the_client(client: OpenAI, aclient: AsyncOpenAI, choice: Any) -> None:
    """By `parse`, whole and streamed by the helper, synchronous and not; parallel where the client allows it."""
    asked: Any = {"model": "default", "messages": USER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 900}
    several = 0
    for seed in range(2):
        whole = client.chat.completions.parse(**asked, seed=seed).choices[0]
        num_calls = check_calls(whole.message.tool_calls)
        several += num_calls > 1
        assert num_calls
        assert whole.finish_reason == "tool_calls"
        one = await aclient.chat.completions.parse(**asked, seed=seed, parallel_tool_calls=False)
        assert check_calls(one.choices[0].message.tool_calls) == 1
        with client.chat.completions.stream(**asked, seed=seed) as stream:
            done = [event for event in stream if isinstance(event, FunctionToolCallArgumentsDoneEvent)]
            final = stream.get_final_completion().choices[0]
        assert check_calls(final.message.tool_calls) == num_calls == len(done)
        assert [c.function.arguments for c in final.message.tool_calls or ()] == [
            c.function.arguments for c in whole.message.tool_calls or ()
        ]
    assert several, "no seed gave more than one call"


async def test_pydantic_answers_are_parsed_by_the_client(client: OpenAI, aclient: AsyncOpenAI) -> None:
    """`chat.completions.parse` and its streaming helper, `responses.parse` and its streaming helper: one object."""
    asked: Any = {"model": "default", "seed": 4}
    chat: Any = {**asked, "messages": USER, "max_tokens": 200, "response_format": Person}
    person = client.chat.completions.parse(**chat).choices[0].message.parsed
    assert isinstance(person, Person)
    async with aclient.chat.completions.stream(**chat) as stream:
        (done,) = [event async for event in stream if isinstance(event, ContentDoneEvent)]
    assert done.parsed == person
    answers: Any = {"model": "default", "input": "What is gravity?", "max_output_tokens": 200, "text_format": Person}
    answers["extra_body"] = {"seed": 4}
    parsed = (await aclient.responses.parse(**answers)).output_parsed
    assert parsed == person
    with client.responses.stream(**answers) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert final.output_parsed == parsed
    assert kinds[-1] == "response.completed"


async def test_responses_call_and_go_on(client: OpenAI, aclient: AsyncOpenAI) -> None:
    """A forced call, streamed and whole; its result is sent back with the output, and the model answers."""
    asked: Any = {"model": "default", "tools": TOOLS, "parallel_tool_calls": False, "extra_body": {"seed": 5}}
    forced: Any = {**asked, "tool_choice": {"type": "function", "name": "Weather"}, "max_output_tokens": 300}
    first = client.responses.parse(**forced, input="weather?")
    (call,) = first.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Weather)
    async with aclient.responses.stream(**forced, input="weather?") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        final = await stream.get_final_response()
    (streamed,) = final.output
    assert streamed.type == "function_call"
    assert "".join(deltas) == streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [{"role": "user", "content": "weather?"}, call.to_dict(exclude_unset=True), result]
    for item in items:
        item.pop("parsed_arguments", None)
    last = client.responses.parse(**asked, input=items, tool_choice="none", max_output_tokens=8)
    assert (last.output[0].type, last.status) == ("message", "incomplete")
    assert last.usage is not None
    assert last.usage.output_tokens == 8


def test_refusals_are_the_clients_exceptions(client: OpenAI) -> None:
    """400 with the field, 404 for what is not there: the class, the code and the words arrive."""
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="default", messages=USER, temperature=9)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    assert wrong.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="default", prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as other:
        client.chat.completions.create(model="gpt-none", messages=USER)
    assert other.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="embedding"):
        client.embeddings.create(model="default", input="x")
    for ask in (
        lambda: client.moderations.create(input="x"),
        lambda: client.files.list(),
        lambda: client.responses.retrieve("resp-1"),
        lambda: client.images.generate(prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


LONG: Any = {**GREEDY, "messages": USER, "max_tokens": 900, "extra_body": {"ignore_eos": True}}


def cancelled(pair: Stack) -> float:
    return pair.total("decode", "cancelled_total") + pair.total("prefill", "cancelled_total")


async def test_a_client_that_leaves_is_not_worked_for(pair: Stack, client: OpenAI, aclient: AsyncOpenAI) -> None:
    """A stream closed, a time limit of the client's, a cancelled task: each frees the workers at once."""
    before = cancelled(pair)
    stream = client.chat.completions.create(**LONG, stream=True)
    next(iter(stream))
    stream.close()
    pair.wait_until(lambda: cancelled(pair) == before + 1, "a closed stream is cancelled")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**LONG)
    pair.wait_until(lambda: cancelled(pair) == before + 2, "a request given up is cancelled")
    events = await aclient.chat.completions.create(**LONG, stream=True)
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            async for _ in events:
                tasks.cancel_scope.cancel()

        tasks.start_soon(read)
    await events.close()
    pair.wait_until(lambda: cancelled(pair) == before + 3, "a cancelled task's stream is cancelled")
