"""Structured output and tools by the real model, by the openai client: aggregated and handed off, the same answers."""

import json
import os
from typing import Any, Literal

import anyio
import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

from tests.flow.stack import Stack
from tests.schemas import Schema, random_schema

pytestmark = [pytest.mark.anyio, pytest.mark.flow]
NUM_SCHEMAS = int(os.environ.get("BATON_TEST_SCHEMAS", "4"))
"""200 in the long run."""
MAX_TOKENS = 700
AT_ONCE = 16
SPEED = {"model__dtype": "auto", "model__max_model_len": 4096}

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class Address(BaseModel):
    street: str = Field(max_length=16)
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    name: str = Field(max_length=16)
    kind: Literal["adult", "child"]
    home: Address
    tags: list[Literal["a", "b"]] = Field(max_length=2)


async def answer_to(client: AsyncOpenAI, schema: Schema, seed: int) -> str:
    """Drawn at temperature 1: a wrong mask would show."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "out", "strict": True, "schema": schema}}
    response = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": f"Make up an example of this, number {seed}."}],
        response_format=form,
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        seed=seed,
    )
    (choice,) = response.choices
    assert choice.finish_reason == "stop", f"seed {seed}: {choice.finish_reason}: {choice.message.content}"
    assert choice.message.content is not None
    return choice.message.content


async def answers(client: AsyncOpenAI) -> list[str]:
    """All schemas, several at once, so that rows with grammars share steps."""
    out: list[str] = [""] * NUM_SCHEMAS
    gate = anyio.CapacityLimiter(AT_ONCE)

    async def one(seed: int) -> None:
        async with gate:
            schema = random_schema(seed)
            out[seed] = await answer_to(client, schema, seed)
            checker = jsonschema.FormatChecker()
            jsonschema.validate(json.loads(out[seed]), schema, format_checker=checker)

    async with anyio.create_task_group() as tasks:
        for seed in range(NUM_SCHEMAS):
            tasks.start_soon(one, seed)
    return out


async def tools_work(client: AsyncOpenAI) -> None:
    """Forced calls, streamed and not, are calls of the client's schema."""
    parameters = WEATHER["function"]["parameters"]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        asked: Any = {"model": "default", "messages": ASK, "tools": [WEATHER], "tool_choice": choice, "seed": 3}
        asked |= {"max_tokens": 300, "parallel_tool_calls": False}
        whole = await client.chat.completions.create(**asked)
        assert whole.choices[0].finish_reason == "tool_calls"
        (call,) = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), parameters)
        name = arguments = ""
        reason = None
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                assert delta.function is not None
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
        assert (name, arguments, reason) == ("weather", call.function.arguments, "tool_calls")


async def parse_works(client: AsyncOpenAI) -> None:
    """The client's own `parse`, with a pydantic model."""
    messages: Any = [{"role": "user", "content": "Describe a person."}]
    response = await client.chat.completions.parse(
        model="default", messages=messages, response_format=Person, max_tokens=MAX_TOKENS, seed=1
    )
    person = response.choices[0].message.parsed
    assert isinstance(person, Person)
    with pytest.raises(BadRequestError, match="unevaluatedProperties"):
        await client.chat.completions.create(
            model="default", messages=messages, extra_body={"guided_json": {"unevaluatedProperties": False}}
        )


async def run(prefill: int) -> list[str]:
    handoff = {"scheduler__min_handoff_tokens": 1} if prefill else {}
    with Stack(prefill=prefill, decode=1, **SPEED, **handoff) as stack:
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=600, max_retries=0) as client:
            if prefill:
                await tools_work(client)
                await parse_works(client)
            return await answers(client)


@pytest.mark.timeout(1800)
async def test_schemas_and_tools_hold_aggregated_and_handed_off(record_property: Any):
    """Every answer is valid by its schema, and the very same whether prefill and decode are one worker or two."""
    together, handed_off = await run(0), await run(1)
    assert together == handed_off
    record_property("schemas", len(together))
