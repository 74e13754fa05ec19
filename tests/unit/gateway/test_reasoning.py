"""What a model thinks, through whole endpoints: a field or an item of its own, counted, streamed and not."""

from typing import Any

import pytest

from shared.tokenizer import Tokenizer
from tests.unit.gateway.conftest import Gateway, client_of, make_gateway
from tests.unit.gateway.fakes import answer

pytestmark = pytest.mark.anyio
SAID = "<think>Apples fall, so why not the moon?</think>\n\nIt does fall."
THOUGHT, TEXT = "Apples fall, so why not the moon?", "It does fall."
USER: Any = [{"role": "user", "content": "why?"}]


@pytest.fixture
def thinking(tokenizer: Tokenizer) -> Gateway:
    """A model that thinks aloud before it answers."""
    gateway = make_gateway(tokenizer, reasoning_parser="think")
    gateway.port.script = answer(gateway.ids(SAID), reason="stop")
    return gateway


def num_thoughts(gateway: Gateway) -> int:
    """Tokens after which the thoughts were not over, from the text itself."""
    ids = gateway.ids(SAID)
    return sum(1 for i in range(1, len(ids) + 1) if "</think>" not in gateway.tokenizer.decode(ids[:i]))


async def test_a_chats_thoughts_are_a_field_and_are_counted(thinking: Gateway):
    """`reasoning_content`, and `completion_tokens_details` in the usage, which a stream has at its end."""
    asked: Any = {"model": "smol", "messages": USER}
    async with thinking.server() as port, client_of(port) as client:
        whole: Any = await client.chat.completions.create(**asked)
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks: list[Any] = [chunk async for chunk in await client.chat.completions.create(**asked, **options)]
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, TEXT)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens_details.reasoning_tokens == num_thoughts(thinking)
        assert usage.completion_tokens == len(thinking.ids(SAID))


async def test_a_responses_thoughts_are_an_item_and_are_counted(thinking: Gateway):
    """Before the message, with events of its own; sent back with the next question it is understood."""
    asked: Any = {"model": "smol", "input": "why?"}
    async with thinking.server() as port, client_of(port) as client:
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        items: Any = [*USER, *(item.model_dump(exclude_none=True) for item in whole.output), *USER]
        await client.responses.create(model="smol", input=items, include=["reasoning.encrypted_content"])
    thoughts, message = whole.output
    assert thoughts.type == "reasoning"
    assert thoughts.content is not None
    assert [part.text for part in thoughts.content] == [THOUGHT]
    assert (message.type, whole.output_text) == ("message", TEXT)
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == num_thoughts(thinking)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    assert len(deltas) > 3
    kinds = list(dict.fromkeys(event.type for event in events if "reasoning" in event.type))
    assert kinds == ["response.reasoning_text.delta", "response.reasoning_text.done"]
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["reasoning", "message"]
    assert last.response.usage is not None
    assert last.response.usage.output_tokens_details == whole.usage.output_tokens_details


async def test_an_answer_without_thoughts_counts_none(gateway: Gateway):
    """And a model that does not think has no such count in a chat's usage."""
    gateway.port.script = answer(gateway.ids(TEXT), reason="stop")
    async with gateway.server() as port, client_of(port) as client:
        chat = await client.chat.completions.create(model="smol", messages=USER)
        response = await client.responses.create(model="smol", input="why?")
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is None
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 0
