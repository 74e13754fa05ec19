"""Tokens and their text, the version, what is not there, and the description of it all."""

import tomllib
from pathlib import Path

import jsonschema
import pytest

from services.gateway.field_schema import SchemaFields
from services.gateway.openapi import api_routes
from services.gateway.params import read_params
from services.gateway.responses import ResponsesEndpoint
from services.gateway.small_endpoints import SmallEndpoints
from shared.tokenizer import Tokenizer
from shared.version import VERSION
from tests.unit.gateway.conftest import Gateway

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[3]


async def test_tokens_and_back(gateway: Gateway):
    """A prompt's ids, and their text again."""
    text = "Hello 🦜 there"
    async with gateway.client() as client:
        there = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        back = (await client.post("/detokenize", json={"tokens": there["tokens"]})).json()
    assert there["tokens"] == gateway.tokenizer.encode(text, add_special_tokens=True)
    assert (there["count"], there["max_model_len"]) == (len(there["tokens"]), 2048)
    assert there["token_strs"] == [gateway.tokenizer.backend.id_to_token(i) for i in there["tokens"]]
    assert back == {"prompt": text}


async def test_messages_are_tokenised_as_a_chat_would_be(gateway: Gateway):
    """The prompt that the workers get."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with gateway.client() as client:
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        prompt = gateway.tokenizer.backend.decode(tokens, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "<|im_start|>user\nhi<|im_end|>" in prompt


async def test_special_tokens_have_their_text(gateway: Gateway):
    """They are not dropped: the text of a chat's tokens is the prompt."""
    text = "<|im_start|>user\nhi<|im_end|>"
    async with gateway.client() as client:
        tokens = (await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}


async def test_what_is_hopelessly_long_is_not_tokenised(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """It could not fit however it is tokenised, and its tokens would take far more memory than its text."""
    longest = gateway.tokenizer.max_token_bytes
    assert longest is not None

    def never(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "encode", never)
    text = "x" * (longest * 2048 + 1)
    async with gateway.client() as client:
        for body, named in (
            ({"prompt": text}, "prompt"),
            ({"messages": [{"role": "user", "content": text}]}, "messages"),
        ):
            response = await client.post("/tokenize", json=body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (named, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "y"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
async def test_wrong_fields_are_named(gateway: Gateway, path: str, body: dict[str, object], named: str):
    """As everywhere."""
    async with gateway.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == named


async def test_embeddings_are_refused_by_what_the_model_is(gateway: Gateway):
    """Not as an unknown URL."""
    async with gateway.client() as client:
        response = await client.post("/v1/embeddings", json={"model": "smol", "input": "hi"})
        unknown = await client.post("/v1/unheard-of", json={})
    assert response.status_code == 404
    assert "cannot make embeddings" in response.json()["error"]["message"]
    assert unknown.json()["error"]["code"] == "unknown_url"


async def test_the_version_is_the_projects(gateway: Gateway):
    """One number in two places."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    async with gateway.client() as client:
        assert (await client.get("/version")).json() == {"version": project["version"]}
    assert project["version"] == VERSION


async def test_the_document_is_openapi_and_names_every_route(gateway: Gateway):
    """What is served and what is described are the same."""
    async with gateway.client() as client:
        found = (await client.get("/openapi.json")).json()
    assert found["openapi"].startswith("3.1")
    served = {route.path.replace(":path}", "}") for route in gateway.app.routes}  # type: ignore[attr-defined]
    assert set(found["paths"]) == served - {"/openapi.json"}
    for path in found["paths"].values():
        for operation in path.values():
            body = operation.get("requestBody")
            if body:
                jsonschema.Draft202012Validator.check_schema(body["content"]["application/json"]["schema"])


def test_every_reader_reads_to_its_end():
    """A reader that refused the empty request early would hide the fields behind."""
    fields = SchemaFields()
    read_params(fields, chat=True)
    names = set(fields.schema()["properties"])
    assert {"max_tokens", "temperature", "stop", "stream_options", "ignore_eos", "seed"} <= names


@pytest.mark.parametrize(
    ("path", "names", "others"),
    [
        (
            "/tokenize",
            "tools tool_choice add_generation_prompt continue_final_message chat_template_kwargs messages prompt",
            "temperature",
        ),
        ("/v1/responses", "input text top_k min_p seed stop logit_bias max_output_tokens", "messages stream_options"),
    ],
)
async def test_what_is_passed_on_to_a_chat_is_described(gateway: Gateway, path: str, names: str, others: str):
    """All that is taken, and nothing that is not."""
    async with gateway.client() as client:
        found = (await client.get("/openapi.json")).json()
    body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(names.split()) <= set(body["properties"])
    assert not set(others.split()) & set(body["properties"])
    assert body["required"] == (["input"] if path == "/v1/responses" else [])


BOUNDS = [
    ("/v1/completions", {"prompt": "hi"}, ("max_tokens", "temperature", "top_p", "top_k", "seed")),
    ("/v1/responses", {"input": "hi"}, ("max_output_tokens", "temperature", "top_p")),
]


@pytest.mark.parametrize(("path", "body", "names"), BOUNDS)
async def test_described_bounds_are_the_ones_checked(gateway: Gateway, path: str, body: dict, names: tuple[str, ...]):
    """One step beyond each bound of the document is refused by name; the bound itself is not."""
    parts = gateway.app.state.parts
    ends = gateway.app.state.endpoints
    table = api_routes(ends["completions"], ends["chat"], ResponsesEndpoint(parts), SmallEndpoints(parts))
    properties = next(route for route in table if route.path == path).request_schema()["properties"]
    gateway.port.capacity = 0  # what is not refused for its fields is for the queue
    async with gateway.client() as client:
        for name in names:
            schema = properties[name]
            for key, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
                if key in schema:
                    wrong = await client.post(path, json={**body, name: schema[key] + step})
                    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
            if "tokens" not in name and "minimum" in schema:
                right = await client.post(path, json={**body, name: schema["minimum"]})
                assert right.status_code == 429, right.text
