"""The depth of clients' JSON is bounded, in bodies and in texts that hold JSON."""

from typing import Any

import httpx
import pytest

from services.gateway.nested_json import MAX_DEPTH
from tests.unit.gateway.conftest import Gateway

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/tokenize", "/detokenize"])
async def test_a_body_nested_too_deeply_is_refused(gateway: Gateway, path: str):
    """257 levels, of arrays or objects, with the body's own; the depth that is allowed is named. 256 are read."""
    async with gateway.client() as client:
        for begin, end in (("[", "]"), ('{"a":', "}")):
            for depth in (MAX_DEPTH + 1, 950):
                content = '{"metadata": ' + begin * (depth - 1) + "1" + end * (depth - 1) + "}"
                found = error(await client.post(path, content=content), 400)
                assert (found["code"], found["param"]) == ("invalid_json", "body")
                assert str(MAX_DEPTH) in found["message"]
            content = '{"x": [[], []], "y": ' + begin * (MAX_DEPTH - 1) + "1" + end * (MAX_DEPTH - 1) + "}"
            assert error(await client.post(path, content=content), 400)["code"] != "invalid_json"


async def test_json_in_texts_is_bounded_too(gateway: Gateway):
    """A schema as text, a call's arguments: each is decoded and encoded again."""
    for depth in (MAX_DEPTH + 1, 950, 50_000):
        text = '{"a":' * depth + "1" + "}" * depth
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        chat = [*USER, {"role": "assistant", "tool_calls": [call]}]
        async with gateway.client() as client:
            found = error(await client.post(COMPLETIONS, json={"prompt": "x", "guided_json": text}), 400)
            assert found["param"] == "guided_json"
            found = error(await client.post(CHAT, json={"messages": chat}), 400)
            assert found["param"].startswith("messages[1].tool_calls[0]")
