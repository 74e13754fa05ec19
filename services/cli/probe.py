"""Asking a service whether it is ready."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx

from services.cli.supervisor import ServiceSpec

TIMEOUT_S = 2.0
REDIS_SOCKET = "redis+unix://"


class ServiceProbe:
    """GET for http, PING for Redis."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ready(self, spec: ServiceSpec) -> bool:
        if spec.ready.startswith(REDIS_SOCKET):
            return await _redis_answers(spec.ready.removeprefix(REDIS_SOCKET))
        try:
            return (await self._client.get(spec.ready)).status_code == 200
        except (httpx.HTTPError, OSError):
            return False


@asynccontextmanager
async def local_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client for this machine: no proxy from the environment, no connection kept (services come and go)."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as client:
        yield client


async def _redis_answers(socket: str) -> bool:
    try:
        with anyio.fail_after(TIMEOUT_S):
            async with await anyio.connect_unix(socket) as stream:
                await stream.send(b"PING\r\n")
                return (await stream.receive(64)).startswith(b"+PONG")
    except (OSError, TimeoutError, anyio.BrokenResourceError, anyio.EndOfStream):
        return False
