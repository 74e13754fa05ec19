"""Asking a service whether it is ready."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from services.cli.supervisor import ServiceSpec

TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 10.0
REDIS_SOCKET = "redis+unix://"
NO_ANSWER = "it does not answer"


class ServiceProbe:
    """GET for http, PING for Redis."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.details: dict[str, dict[str, Any]] = {}  # what each service said of itself when it was ready

    async def ready(self, spec: ServiceSpec) -> bool:
        if spec.ready.startswith(REDIS_SOCKET):
            return (await _redis_answers(spec.ready.removeprefix(REDIS_SOCKET))).startswith(b"+PONG")
        try:
            answer = await self._client.get(spec.ready)
            if answer.status_code == 200:
                self.details[spec.name] = _details(answer)
            return answer.status_code == 200
        except (httpx.HTTPError, OSError):
            return False

    async def hangs(self, spec: ServiceSpec) -> str:
        """Why it makes no progress, "" if it does. Who waits for Redis does not hang: a restart would not help it."""
        if spec.ready.startswith(REDIS_SOCKET):
            return "" if await _redis_answers(spec.ready.removeprefix(REDIS_SOCKET), HEALTH_TIMEOUT_S) else NO_ANSWER
        try:
            url = spec.ready.removesuffix("/ready") + "/health"
            answer = await self._client.get(url, timeout=HEALTH_TIMEOUT_S)
            said = answer.json()
        except (httpx.HTTPError, OSError, ValueError):
            return NO_ANSWER
        return "" if answer.status_code == 200 or "redis" in said else f"it says {answer.text}"


@asynccontextmanager
async def local_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client for this machine: no proxy from the environment, no connection kept (services come and go)."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as client:
        yield client


def _details(answer: httpx.Response) -> dict[str, Any]:
    try:
        said = answer.json()
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


async def _redis_answers(socket: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """What it says to a PING; b"" if it says nothing."""
    try:
        with anyio.fail_after(timeout_s):
            async with await anyio.connect_unix(socket) as stream:
                await stream.send(b"PING\r\n")
                return await stream.receive(64)
    except (OSError, TimeoutError, anyio.BrokenResourceError, anyio.EndOfStream):
        return b""
