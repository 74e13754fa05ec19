"""`/v1/responses`, by OpenAI's own client and by hand."""

import json

import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseErrorEvent, ResponseIncompleteEvent

from shared.messages import Finished, Tokens
from tests.unit.gateway.conftest import Gateway, client_of
from tests.unit.gateway.fakes import answer

pytestmark = pytest.mark.anyio
TEXT = "Hello 🦜 there"
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def test_a_response_is_openais_object(gateway: Gateway):
    """Text, status, usage, and what the request said."""
    gateway.port.script = answer(gateway.ids(TEXT), reason="stop", num_cached_tokens=16)
    async with gateway.server() as port, client_of(port) as client:
        response = await client.responses.create(
            model="smol", input="hi", instructions="Be short.", max_output_tokens=50, metadata={"a": "b"}
        )
    assert isinstance(response, Response)
    assert (response.output_text, response.status, response.instructions) == (TEXT, "completed", "Be short.")
    assert response.id.startswith("resp-")
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 16
    assert response.usage.output_tokens == len(gateway.ids(TEXT))
    (request,) = gateway.port.admitted
    assert request.sampling.max_tokens == 50
    prompt = gateway.tokenizer.backend.decode(list(request.token_ids), skip_special_tokens=False)
    assert "Be short." in prompt
    assert prompt.index("Be short.") < prompt.index("hi")


async def test_a_string_and_messages_make_the_same_prompt_as_a_chat(gateway: Gateway):
    """Both forms of `input`, in all forms of content."""
    gateway.port.script = answer(gateway.ids("x"))
    texts: list[object] = ["hi", [{"type": "input_text", "text": "hi"}]]
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        await client.post("/v1/responses", json={"input": "hi"})
        for content in texts:
            body = {"input": [{"role": "user", "content": content}, {"role": "assistant", "content": ""}]}
            await client.post("/v1/responses", json={"input": body["input"][:1]})
    chat, *others = (request.token_ids for request in gateway.port.admitted)
    assert len(others) == 3
    assert set(others) == {chat}


async def test_a_format_is_followed_and_repeated(gateway: Gateway):
    """A JSON schema goes to the workers as a grammar; the response says what format it has."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    gateway.port.script = answer(gateway.ids("{}"), reason="stop")
    async with gateway.client() as client:
        response = await client.post("/v1/responses", json={"input": "hi", "text": wanted})
        wrong = await client.post("/v1/responses", json={"input": "hi", "text": {"format": {"type": "json_schema"}}})
    assert response.status_code == 200, response.text
    assert response.json()["text"] == wanted
    (request,) = gateway.port.admitted
    assert '"integer"' in request.sampling.grammar
    assert (wrong.status_code, wrong.json()["error"]["param"][:11]) == (400, "text.format")


async def test_sampling_parameters_are_those_of_chats(gateway: Gateway):
    """What the client's class does not have goes by its extra body."""
    gateway.port.script = answer(gateway.ids(TEXT))
    extra = {"seed": 7, "top_k": 5, "min_p": 0.1, "stop": " there", "repetition_penalty": 1.2, "logprobs": False}
    async with gateway.server() as port, client_of(port) as client:
        response = await client.responses.create(model="smol", input="hi", extra_body=extra)
    (request,) = gateway.port.admitted
    sampling = request.sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 5, 0.1, 1.2)
    assert response.output_text == TEXT.removesuffix(" there")


async def test_a_streamed_response_has_openais_events_in_order(gateway: Gateway):
    """Typed, numbered; deltas that add up; the whole response at the end."""
    gateway.port.script = answer(gateway.ids(TEXT), reason="stop")
    async with gateway.server() as port, client_of(port) as client:
        stream = await client.responses.create(model="smol", input="hi", stream=True)
        events = [event async for event in stream]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    assert last.response.output_text == TEXT
    assert last.response.usage is not None


async def test_a_response_that_is_cut_says_so(gateway: Gateway):
    """`incomplete`, streamed or not."""
    gateway.port.script = answer(gateway.ids(TEXT))
    async with gateway.server() as port, client_of(port) as client:
        whole = await client.responses.create(model="smol", input="hi", max_output_tokens=2)
        stream = await client.responses.create(model="smol", input="hi", max_output_tokens=2, stream=True)
        *_, last = [event async for event in stream]
    assert isinstance(last, ResponseIncompleteEvent)
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


async def test_a_stream_that_fails_ends_with_a_typed_error(gateway: Gateway):
    """After the first text: the status is out already."""

    def script(request):
        return [
            Tokens(request.request_id, 1, 0, 0, (gateway.ids("Hi")[0],)),
            Finished(request.request_id, 1, "error", 1, 0, "boom"),
        ]

    gateway.port.script = script
    async with gateway.server() as port, client_of(port) as client:
        stream = await client.responses.create(model="smol", input="hi", stream=True)
        *_, last = [event async for event in stream]
    assert isinstance(last, ResponseErrorEvent)
    assert last.code == "internal_error"
    assert "boom" not in last.message


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"model": "other"}, "model"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"seed": "x"}, "seed"),
        ({"min_p": 7}, "min_p"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
async def test_what_is_wrong_is_named_as_the_client_wrote_it(gateway: Gateway, body: dict[str, object], named: str):
    """And nothing is admitted."""
    async with gateway.client() as client:
        response = await client.post("/v1/responses", json={"input": "hi", **body})
    assert response.status_code in (400, 404)
    assert json.loads(response.text)["error"]["param"] == named
    assert not gateway.port.admitted
