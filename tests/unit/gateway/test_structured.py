"""Structured output at the gateway: what is asked of the workers, and what is refused, with the reason."""

import json
from typing import Any

import anyio
import msgspec
import pytest

from services.gateway.errors import ApiError
from services.gateway.grammar_check import ProcessGrammarChecker
from services.gateway.structured import GrammarAsk
from shared.grammar import Vocabulary
from shared.model_path import resolve
from shared.tokenizer import Tokenizer
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import answer

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CHAT = {"messages": [{"role": "user", "content": "x"}]}

GOOD = [
    ({"response_format": {"type": "json_object"}}, '{"b": [1]}', "[1]"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        '{"a": 1}',
        '{"b": 1}',
    ),
    ({"guided_json": SCHEMA}, '{"a":1}', '{"a":1.5}'),
    ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA}}, '{\n  "a": 1\n}', '{"a": "1"}'),
    ({"structured_outputs": {"json_object": True}}, "{}", '"x"'),
    ({"guided_regex": r"^\d{2}-\d{2}$"}, "12-34", "12-345"),
    ({"guided_choice": ["yes", "no", 7]}, "7", "maybe"),
    ({"structured_outputs": {"choice": ["a b", 'q"']}}, 'q"', "a"),
    ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "a12", "b12"),
    ({"guided_grammar": 'root ::= "x" item+\nitem ::= "-" [a-z]'}, "x-a-b", "x"),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    from shared.tokenizer import load_tokenizer

    return Vocabulary(load_tokenizer(resolve("")))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_kind_of_grammar_reaches_the_worker(gateway: Gateway, vocabulary: Vocabulary, path: str):
    """The text that travels accepts what the client described, and nothing else."""
    gateway.port.script = answer(gateway.ids("x"))
    base = CHAT if "chat" in path else {"prompt": "x"}
    async with gateway.client() as client:
        for fields, yes, no in GOOD:
            response = await client.post(path, json=base | fields)
            assert response.status_code == 200, (fields, response.text)
            grammar = gateway.port.admitted[-1].sampling.grammar
            assert follows(vocabulary, grammar, gateway.ids(yes)), (fields, yes)
            assert not follows(vocabulary, grammar, gateway.ids(no)), (fields, no)
        await client.post(path, json=base | {"response_format": {"type": "text"}})
        assert gateway.port.admitted[-1].sampling.grammar == ""


def follows(vocabulary: Vocabulary, grammar: str, token_ids: list[int]) -> bool:
    from shared.errors import GrammarError

    matcher = vocabulary.matcher(grammar)
    try:
        matcher.advance(token_ids)
    except GrammarError:
        return False
    return matcher.accepts


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
    ({"guided_json": {"type": "object", "unevaluatedProperties": False}}, "guided_json", "unevaluatedProperties"),
    ({"guided_json": {"type": "rabbit"}}, "guided_json", "cannot be compiled"),
    ({"guided_json": {"type": "object", "minProperties": 2}}, "guided_json", "minProperties"),
    ({"guided_json": {"const": 12345678901234567890123}}, "guided_json", "64 bits"),
    ({"guided_json": {"type": "integer", "minimum": 1, "exclusiveMinimum": True}}, "guided_json", "draft 4"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": 5}, "guided_json", "must be a JSON schema"),
    ({"guided_json": json.dumps(_deep(300))}, "guided_json", "nested too deeply"),
    ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", "larger than"),
    ({"guided_regex": "(a"}, "guided_regex", "cannot be compiled"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "cannot be compiled"),
    ({"guided_regex": "^$"}, "guided_regex", "empty"),
    ({"guided_choice": []}, "guided_choice", "list"),
    ({"guided_choice": [[]]}, "guided_choice", "string"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
    ({"guided_grammar": 'start: "a" b'}, "guided_grammar", "cannot be compiled"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "cannot be compiled"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "cannot both"),
    ({"guided_json": SCHEMA, "ignore_eos": True}, "ignore_eos", "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs", "one grammar"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "got 2"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "missing"),
    ({"response_format": "json"}, "response_format", "object"),
]


async def test_what_cannot_be_compiled_is_a_400_that_says_why(gateway: Gateway):
    """The field is named, the reason is the compiler's, and nothing reaches the queue."""
    async with gateway.client() as client:
        for fields, param, reason in BAD:
            response = await client.post("/v1/completions", json={"prompt": "x"} | fields)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param, error
            assert reason in error["message"], error
            assert len(error["message"]) < 600
    assert not gateway.port.admitted


EXPONENTIAL = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 30)]}


async def test_a_grammar_without_end_is_stopped_and_the_next_one_is_served():
    """A schema that would compile for years is refused in time, off the event loop; its process alone pays."""
    checker = ProcessGrammarChecker(resolve(""), timeout_s=1.0, max_bytes=1 << 16)
    good = GrammarAsk("guided_regex", "regex", "a+")
    assert await checker.check(good)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.lowlevel.checkpoint()
            ticks += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        with pytest.raises(ApiError, match="longer than 1 s"):
            await checker.check(GrammarAsk("guided_json", "json_schema", msgspec.json.encode(EXPONENTIAL).decode()))
        tasks.cancel_scope.cancel()
    assert ticks > 1000
    assert await checker.check(GrammarAsk("guided_regex", "regex", "b+"))
    assert checker.num_started == 2
    await checker.aclose()


async def test_a_known_grammar_is_not_tried_again():
    """Clients mostly send the same schemas."""
    checker = ProcessGrammarChecker(resolve(""), timeout_s=5, max_bytes=100)
    first = await checker.check(GrammarAsk("f", "regex", "a+"))
    await checker.aclose()
    assert await checker.check(GrammarAsk("g", "regex", "a+")) == first
    assert checker.num_started == 1


async def test_a_client_that_leaves_does_not_mix_up_the_answers():
    """Its answer is taken from the pipe all the same."""
    checker = ProcessGrammarChecker(resolve(""), timeout_s=5, max_bytes=1000)
    await checker.check(GrammarAsk("f", "regex", "x"))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await checker.check(GrammarAsk("f", "regex", "y"))
    assert "z" in await checker.check(GrammarAsk("f", "regex", "z"))
    await checker.aclose()


async def test_a_model_without_an_end_token_cannot_follow_grammars(tokenizer: Tokenizer, tmp_path: Any):
    """It says so, and serves everything else."""
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    checker = ProcessGrammarChecker(tmp_path, timeout_s=5, max_bytes=1000)
    with pytest.raises(ApiError, match="no end token"):
        await checker.check(GrammarAsk("f", "regex", "x"))
    await checker.aclose()
