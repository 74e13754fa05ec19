"""Redis clients, ours and redis-py's, and servers that are none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from shared.redis_client import LineClient


def client_of(url: str, timeout_s: float = 5.0) -> LineClient:
    pool = aioredis.ConnectionPool.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    client = LineClient.from_pool(pool)
    assert isinstance(client, LineClient)
    return client


def plain_of(url: str) -> aioredis.Redis:
    """redis-py's own, of the same protocol."""
    return aioredis.Redis.from_url(url, protocol=2)


async def outcome(call: Callable[[], Awaitable[Any]]) -> tuple[Any, ...]:
    try:
        return ("answer", await call())
    except RedisError as exc:
        return type(exc), str(exc)


class Peer:
    """A server's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes:
        """:raises EOFError: there is nothing more."""
        if not (data := await self._reader.read(1 << 16)):
            raise EOFError
        return data

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def swallow(self) -> None:
        """Say nothing, until the other end is gone."""
        while True:
            await self.receive()


@asynccontextmanager
async def talking(folder: Path, talk: Callable[[Peer], Awaitable[None]], query: str = "") -> AsyncIterator[LineClient]:
    """A client of a server that does `talk` with each connection. It waits 0.2 s for an answer."""

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with suppress(EOFError, ConnectionError):
            await talk(Peer(reader, writer))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, folder / "s")
    client = client_of(f"unix://{folder / 's'}{query}", timeout_s=0.2)
    try:
        yield client
    finally:
        await client.aclose()
        server.close()
        await asyncio.gather(*filter(None, serving))
        await server.wait_closed()
