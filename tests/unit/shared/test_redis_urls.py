"""Which Redis our connections go to, as whom, and over what: all as the URL says."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.clock import SystemClock
from shared.config import RedisConfig
from shared.redis_link import RedisLink
from tests.redis_server import RedisServer
from tests.unit.shared.certificate import make_certificate
from tests.unit.shared.redis_clients import client_of, outcome, plain_of

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The services' loop, and the tests'."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def guarded(redis_server: RedisServer, redis_url: str) -> AsyncIterator[str]:
    """The URL of a server that asks for a user and a password, without them."""
    admin = RedisLink(RedisConfig(url=redis_url), SystemClock())
    await admin.client.execute_command("ACL SETUSER", "me", "on", ">geheim:/@", "~*", "+@all")
    yield redis_url.removeprefix("unix://")
    await admin.client.execute_command("ACL DELUSER", "me")
    await admin.close()


async def test_user_password_database_and_name_are_those_of_the_url(guarded: str):
    """As redis-py reads it, escapes included; what is wrong is told as redis-py tells it."""
    url = f"unix://me:geheim%3A%2F%40@{guarded}?db=3&client_name=mine"
    for make in (client_of, plain_of):
        client = make(url)
        assert await client.execute_command("ACL WHOAMI") == "me"
        info = await client.client_info()
        assert (info["db"], info["name"]) == (3, "mine")
        await client.aclose()
    for wrong in (f"unix://me:wrong@{guarded}", f"unix://me:geheim%3A%2F%40@{guarded}?db=99"):
        told = []
        for make in (client_of, plain_of):
            client = make(wrong)
            told.append(await outcome(lambda client=client: client.get("a")))
            await client.aclose()
        (kind, text), (plain_kind, plain_text) = told
        assert text == plain_text
        assert issubclass(kind, plain_kind)  # redis-py says "connection" where it was the password


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "DNS:localhost")


async def test_tls_is_checked_and_works(redis_url: str, certificate: tuple[Path, Path]):
    """`rediss://` with the certificate's authority; without it the connection is refused."""
    name, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(name, key)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here, there = await asyncio.open_unix_connection(redis_url.removeprefix("unix://"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump, reader, there)
            tasks.start_soon(pump, here, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    client = client_of(f"rediss://localhost:{port}/0?ssl_ca_certs={name}")
    assert await client.set("a", "x" * 100_000)
    assert await client.get("a") == b"x" * 100_000
    await client.aclose()
    stranger = client_of(f"rediss://localhost:{port}/0")
    with pytest.raises(RedisConnectionError, match=r"(?i)certificate"):
        await stranger.get("a")
    await stranger.aclose()
    server.close()
    await server.wait_closed()
