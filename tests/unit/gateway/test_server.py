"""Over a real connection: gone clients, slow clients, and OpenAI's own client."""

import contextlib
import json
import re
import socket

import anyio
import httpx
import openai
import pytest
from anyio.abc import SocketAttribute, SocketStream

from shared.messages import Finished, Tokens
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import answer

pytestmark = pytest.mark.anyio


def post(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def read_until(stream: SocketStream, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        got += await stream.receive()
    return got


def count_words(got: bytes) -> int:
    """A long event is sent in several HTTP chunks, whose frames may fall inside a word."""
    return re.sub(rb"\r\n[0-9a-f]+\r\n", b"", got).count(b" word")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "decoding"])
async def test_a_gone_client_cancels_the_work(gateway: Gateway, stream: bool, when: str):
    """Before and after the first token, streaming or not."""
    async with gateway.server() as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            await connection.send(post({"prompt": "hi", "stream": stream, "max_tokens": 100}))
            await gateway.port.admit_seen.wait()
            request_id = gateway.port.admitted[0].request_id
            if when == "decoding":
                gateway.port.emit(Tokens(request_id, 1, 0, 0, tuple(gateway.ids("Well"))))
                if stream:
                    await read_until(connection, b"data: ")
        with anyio.fail_after(10):
            await gateway.port.cancel_seen.wait()
            while len(gateway.app.state.streams):
                await anyio.lowlevel.checkpoint()
    assert gateway.port.cancelled == [(request_id, "client gone")]
    (summary,) = gateway.observer.of("finished")
    assert summary.reason == "cancelled"


async def test_a_finished_request_is_not_cancelled_when_its_client_leaves(gateway: Gateway):
    """The connection's end is no news then."""
    gateway.port.script = answer([5], reason="stop")
    async with gateway.server() as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            await connection.send(post({"prompt": "hi", "stream": True}))
            await read_until(connection, b"[DONE]")
        await settled()
    assert gateway.port.cancelled == []


async def test_a_slow_client_holds_up_nobody_and_loses_nothing(gateway: Gateway):
    """One client does not read; another is served; then the first gets its whole text."""
    word = gateway.ids(" word")
    num_tokens = 60_000
    async with gateway.server() as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as slow:
            await slow.send(post({"prompt": "hi", "stream": True, "max_tokens": 100}))
            await gateway.port.admit_seen.wait()
            slow_id = gateway.port.admitted[0].request_id
            for start in range(0, num_tokens, 100):
                gateway.port.emit(*(Tokens(slow_id, 1, 0, start + i, tuple(word)) for i in range(100)))
            gateway.port.emit(Finished(slow_id, 1, "length", num_tokens))
            gateway.port.script = answer([5], reason="stop")
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                response = await client.post("/v1/completions", json={"prompt": "hi"})
                assert response.status_code == 200
            with anyio.fail_after(30):
                got = await read_until(slow, b"[DONE]")
    assert count_words(got) == num_tokens


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_reads_nothing_is_cancelled(gateway: Gateway, reads: bool):
    """After 30 s in which its socket took no byte; one that reads, however late, is left alone."""
    num_tokens, word = 60_000, tuple(gateway.ids(" word"))
    async with gateway.server(send_buffer=8192) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as client:
            client.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            await client.send(post({"prompt": "hi", "stream": True, "max_tokens": 100}))
            await gateway.port.admit_seen.wait()
            request_id = gateway.port.admitted[0].request_id
            for start in range(0, num_tokens, 100):
                gateway.port.emit(*(Tokens(request_id, 1, 0, start + i, word) for i in range(100)))
                if start == num_tokens // 2:  # what is sent after the buffers are full is what waits
                    await settled()
            await settled()
            await advance(gateway, 29.0)
            assert gateway.port.cancelled == []
            if not reads:
                await advance(gateway, 31.0)
                with anyio.fail_after(10):
                    await gateway.port.cancel_seen.wait()
                assert gateway.port.cancelled == [(request_id, "client gone")]
                assert len(gateway.app.state.streams) == 0
                return
            got = b""
            with anyio.fail_after(30):
                while count_words(got) < num_tokens:
                    got += await client.receive()
            await advance(gateway, 60.0)
            gateway.port.emit(Finished(request_id, 1, "length", num_tokens))
            with anyio.fail_after(10):
                await read_until(client, b"[DONE]")
    assert gateway.port.cancelled == []


async def settled() -> None:
    """All tasks wait. anyio's own `wait_all_tasks_blocked` looks every 0.1 s, and uvicorn's main loop wakes as often:
    in step with each other, the one would find the other awake for ever."""
    with anyio.fail_after(30):
        while True:
            with anyio.move_on_after(0.037) as looked:
                await anyio.wait_all_tasks_blocked()
            if not looked.cancelled_caught:
                return


async def advance(gateway: Gateway, seconds: float) -> None:
    """In steps, so that what sleeps in between looks in between."""
    for _ in range(10):
        gateway.clock.advance(seconds / 10)
        await settled()


async def test_the_openai_client_works_unmodified(gateway: Gateway):
    """Models, completions and chat, streamed and not, and its errors."""
    gateway.port.script = answer(gateway.ids("Hi there"), reason="stop", num_cached_tokens=2)
    async with gateway.server() as port:
        http = httpx.AsyncClient(trust_env=False)
        base = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, http_client=http) as client:
            assert [model.id async for model in client.models.list()] == ["smol"]
            completion = await client.completions.create(model="default", prompt="hi", max_tokens=5)
            assert completion.choices[0].text == "Hi there"
            chat = await client.chat.completions.create(model="smol", messages=[{"role": "user", "content": "hi"}])
            assert chat.choices[0].message.content == "Hi there"
            assert chat.usage is not None
            assert chat.usage.prompt_tokens_details is not None
            assert chat.usage.prompt_tokens_details.cached_tokens == 2
            text, reasons, usages = "", [], []
            async for chunk in await client.chat.completions.create(
                model="smol",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            ):
                usages += [chunk.usage] if chunk.usage else []
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert (text, reasons, len(usages)) == ("Hi there", ["stop"], 1)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="hi")
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="smol", prompt="hi", temperature=9)
            assert refused.value.param == "temperature"
            gateway.port.script = answer(gateway.ids("Hi"), reason="error")
            with pytest.raises(openai.APIError):
                async for _ in await client.completions.create(model="smol", prompt="hi", stream=True):
                    pass


async def test_requests_one_after_another_share_a_connection(gateway: Gateway):
    """Watching for a gone client does not eat the next request."""
    gateway.port.script = answer([5], reason="stop")
    async with gateway.server() as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            for _ in range(3):
                await connection.send(post({"prompt": "hi"}))
                assert b" 200 " in await read_until(connection, b'"usage"')


@pytest.mark.parametrize(
    "raw",
    [
        b"NO SENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n bad header\r\n:\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_bytes_that_are_no_http_get_an_error_like_all_others(gateway: Gateway, raw: bytes):
    """400 in OpenAI's shape, and the connection ends."""
    async with gateway.server() as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            await connection.send(raw)
            got = b""
            with anyio.fail_after(10), contextlib.suppress(anyio.EndOfStream):
                while True:
                    got += await connection.receive()
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
