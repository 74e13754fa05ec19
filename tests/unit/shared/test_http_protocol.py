"""What the server does with clients that are slow, many, or encrypted."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from shared.errors import ConfigError
from shared.health import HttpLimits, bind, serve_app
from tests.unit.shared.certificate import make_certificate

pytestmark = pytest.mark.anyio


async def hello(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def long(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("x" * (1 << 20))


@asynccontextmanager
async def serving(limits: HttpLimits) -> AsyncIterator[int]:
    async with anyio.create_task_group() as tasks:
        app = Starlette(routes=[Route("/", hello, methods=["GET", "POST"]), Route("/long", long)])
        yield await tasks.start(serve_app, app, bind("127.0.0.1", 0), 1.0, limits)
        tasks.cancel_scope.cancel()


async def send_for_ever(stream: anyio.abc.ByteStream, data: bytes) -> None:
    while True:
        await stream.send(data)


async def read_all(stream: anyio.abc.ByteStream) -> bytes:
    got = b""
    try:
        while True:
            got += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return got


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes):
    """408 if some of it came, nothing if none did; byte after byte does not help."""
    async with serving(HttpLimits(header_timeout_s=0.2)) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream, anyio.create_task_group() as tasks:

            async def drip() -> None:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    while True:
                        await stream.send(b"a")
                        await anyio.sleep(0.02)

            if sent:
                await stream.send(sent)
                tasks.start_soon(drip)
            with anyio.fail_after(10):
                got = await read_all(stream)
            await stream.aclose()
    assert got.startswith(b"HTTP/1.1 408 ") if sent else got == b""


async def test_a_kept_connection_has_the_time_anew_for_each_request():
    """A second request whose head stops half-way is cut; whole ones are not."""
    whole = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(HttpLimits(header_timeout_s=0.3)) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            for _ in range(4):
                await stream.send(whole)
                got = b""
                while b"hello" not in got:
                    got += await stream.receive()
                await anyio.sleep(0.1)
            await stream.send(whole[:10])
            with anyio.fail_after(10):
                assert (await read_all(stream)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("framing", [b"content-length: 1000000", b"transfer-encoding: chunked"])
async def test_a_body_that_nobody_waits_for_ends_the_connection(framing: bytes):
    """The request is answered without it; byte after byte of it does not hold the connection."""
    async with serving(HttpLimits(header_timeout_s=0.2)) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream, anyio.create_task_group() as tasks:

            async def drip() -> None:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    while True:
                        await stream.send(b"1\r\na\r\n" if b"chunked" in framing else b"a")
                        await anyio.sleep(0.02)

            await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n")
            tasks.start_soon(drip)
            with anyio.fail_after(10):
                got = await read_all(stream)
            await stream.aclose()
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.endswith(b"hello")


async def test_a_body_that_comes_after_its_answer_keeps_the_connection():
    """It was only late: the next request on the connection is answered, and that one's own body has its time."""
    async with serving(HttpLimits(header_timeout_s=30)) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            for _ in range(3):
                await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
                got = b""
                with anyio.fail_after(10):
                    while not got.endswith(b"hello"):
                        got += await stream.receive()
                assert got.startswith(b"HTTP/1.1 200 ")
                await stream.send(b"body")


async def test_a_client_that_reads_nothing_is_cut():
    """It asks for more than all buffers hold; one that reads gets everything."""
    request = b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(HttpLimits(stall_s=0.3)) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            with anyio.fail_after(20), pytest.raises(anyio.BrokenResourceError):
                await send_for_ever(stream, request)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert len((await client.get(f"http://127.0.0.1:{port}/long")).content) == 1 << 20


async def test_an_offer_of_another_protocol_is_not_taken():
    """Neither WebSocket nor HTTP/2: the request is answered as it is."""
    async with serving(HttpLimits()) as port, httpx.AsyncClient(trust_env=False) as client:
        for other in ("websocket", "h2c"):
            headers = {"connection": "upgrade", "upgrade": other}
            answer = await client.get(f"http://127.0.0.1:{port}/", headers=headers)
            assert (answer.status_code, answer.text) == (200, "hello")


async def test_connections_beyond_the_bound_are_sent_away():
    """And the place is free again when another one leaves."""
    async with serving(HttpLimits(max_connections=2)) as port:
        first, second = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 503
        await first.aclose()
        with anyio.fail_after(10):
            while True:
                async with httpx.AsyncClient(trust_env=False) as client:
                    if (await client.get(f"http://127.0.0.1:{port}/")).status_code == 200:
                        break
        await second.aclose()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


async def test_tls(certificate: tuple[Path, Path]):
    """With a certificate the port speaks TLS, and nothing else."""
    cert, key = certificate
    async with serving(HttpLimits(tls_cert=str(cert), tls_key=str(key))) as port:
        context = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            assert (await client.get(f"https://127.0.0.1:{port}/")).text == "hello"
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{port}/")


async def test_tls_files_that_cannot_be_used_stop_the_start(certificate: tuple[Path, Path], tmp_path: Path):
    """The message names them."""
    cert, _ = certificate
    for key in (tmp_path / "nowhere.pem", cert):
        with pytest.raises(ConfigError, match=str(cert)):
            await serve_app(Starlette(), bind("127.0.0.1", 0), 1.0, HttpLimits(tls_cert=str(cert), tls_key=str(key)))
