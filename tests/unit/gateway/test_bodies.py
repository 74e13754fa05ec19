"""Large bodies are bounded together: what would be too much is refused, and room comes back with each request's end."""

from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from shared.messages import Finished, Tokens
from shared.tokenizer import Tokenizer
from tests.unit.gateway.conftest import Gateway, make_gateway
from tests.unit.gateway.fakes import answer

pytestmark = pytest.mark.anyio
LARGE: dict[str, Any] = {"prompt": "hi", "metadata": {"note": "x" * 200_000}}


@pytest.fixture
def narrow(tokenizer: Tokenizer) -> Gateway:
    """Room for one large body."""
    return make_gateway(tokenizer, max_open_body_bytes=200_000)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return await client.post(path, json=body)


async def test_large_bodies_are_bounded_together(narrow: Gateway) -> None:
    """One is held while it is answered: another large one gets 503 with the time to wait, small ones are served."""
    got: list[httpx.Response] = []
    async with narrow.client() as client, anyio.create_task_group() as tasks:

        async def first() -> None:
            got.append(await ask(client, LARGE))

        tasks.start_soon(first)
        await narrow.port.admit_seen.wait()
        waiting = narrow.port.admitted[0].request_id
        narrow.port.script = answer([28], reason="stop")
        for path in ("/v1/completions", "/tokenize"):
            refused = await ask(client, LARGE, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert int(refused.headers["retry-after"]) > 0
        assert (await ask(client, {"prompt": "hi"})).status_code == 200
        assert (await ask(client, {"prompt": "x" * 60_000}, "/tokenize")).status_code == 200
        narrow.port.emit(Tokens(waiting, 1, 0, 0, (28,)), Finished(waiting, 1, "stop", 1))
    async with narrow.client() as client:
        for path in ("/v1/completions", "/tokenize", "/v1/completions"):
            assert (await ask(client, LARGE, path)).status_code == 200
    assert got[0].status_code == 200


async def test_room_comes_back_from_what_was_refused(narrow: Gateway) -> None:
    """Wrong, too large for itself, or left by its client in the middle: nothing stays held."""
    async with narrow.server() as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            for _ in range(3):
                assert (await ask(client, LARGE | {"temperature": 9})).status_code == 400
                assert (await ask(client, {"prompt": "x" * (1 << 20)})).status_code == 413
        bodies = narrow.app.state.parts.bodies
        assert bodies.num_bytes == 0
        with anyio.fail_after(10):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n{"
                await stream.send(head + b" " * 150_000)
                while not bodies.num_bytes:
                    await anyio.lowlevel.checkpoint()
            while bodies.num_bytes:
                await anyio.lowlevel.checkpoint()
