"""The one way to Redis: a client with bounded retries, so that a restart of Redis is a pause and not a fault.

A call whose answer was lost is sent again; so everything that is sent through `call` must be idempotent
(each script in `shared/lua/` says why it is).
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.clock import Clock
from shared.config import RedisConfig
from shared.errors import BusError, BusFull
from shared.redis_client import LineClient

T = TypeVar("T")
MIN_VERSION = (6, 2)
SOCKET_TIMEOUT_S = 8.0
CONNECT_TIMEOUT_S = 2.0
FIRST_DELAY_S = 0.02
MAX_BLOCK_S = 2.0
"""Blocking reads are cut to this and repeated: below the socket time-out, so that a dead link is noticed."""

_FULL = "OOM command not allowed"
_UNABLE = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)
_UNABLE_WORDS = ("MISCONF", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")
"""A Redis that cannot write now (its disk is full, it is a replica since a moment ago, ...): an outage too. From inside
a script only the words arrive."""
_LOST = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ConnectionError, OSError)


def _as_sent(reply: Any, **_options: Any) -> Any:
    """Stream replies stay lists of [id, [field, value, ...]]: an entry may repeat a field, a dict may not."""
    return reply


def connect(config: RedisConfig) -> Any:
    """A client that never retries by itself. Connects when first used."""
    pool = ConnectionPool.from_url(
        config.url,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )
    client: Any = LineClient.from_pool(pool)
    for command in ("XREAD", "XREADGROUP", "XAUTOCLAIM"):
        client.set_response_callback(command, _as_sent)
    return client


class RedisLink:
    """Retries over a client. `outages` counts calls that had to be repeated, `last_outage` says until when Redis was
    away, as far as is known.

    :param client: in place of one for `config.url` (the simulation's).
    """

    def __init__(self, config: RedisConfig, clock: Clock, client: Any = None) -> None:
        self._clock = clock
        self._retry_s = config.retry_s
        self.client: Any = client or connect(config)
        self.outages = 0
        self.last_outage: float | None = None
        self.is_down = False  # as the last call to end found it

    def be_patient(self) -> None:
        """From now on wait for Redis however long it is away: for a process whose state is worth more than a quick
        exit (a worker's KV and weights)."""
        self._retry_s = math.inf

    async def call(self, command: Callable[[], Awaitable[T]]) -> T:
        """Run `command` until Redis answers.

        :raises BusFull: Redis has no memory for it.
        :raises BusError: Redis was unreachable (or unable to write) for `retry_s`, or refused the command.
        """
        started = self._clock.now()
        delay = FIRST_DELAY_S
        while True:
            try:
                answer = await command()
                self._answered(delay)
                return answer
            except _LOST as exc:
                self._outage(exc, started)
            except RedisError as exc:
                if isinstance(exc, OutOfMemoryError) or _FULL in str(exc):
                    self._answered(delay)
                    raise BusFull("redis is full") from exc
                if not isinstance(exc, _UNABLE) and not any(word in str(exc) for word in _UNABLE_WORDS):
                    self._answered(delay)
                    raise BusError(f"redis refused a command: {exc}") from exc
                self._outage(exc, started)
            await self._clock.sleep(delay)
            delay = min(2 * delay, 0.5)

    def _outage(self, exc: Exception, started: float) -> None:
        """:raises BusError: it has lasted for `retry_s`."""
        self.is_down = True
        self.outages += 1
        self.last_outage = self._clock.now()
        if self.last_outage - started > self._retry_s:
            raise BusError(f"redis does not answer: {exc}") from exc

    def _answered(self, delay: float) -> None:
        self.is_down = False
        if delay > FIRST_DELAY_S:
            self._answers_again()

    def _answers_again(self) -> None:
        """It was away until now, however long this process stood still meanwhile."""
        self.last_outage = self._clock.now()

    async def batch(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The answers to several commands that are sent together, aligned.

        :raises BusError: as `call`.
        """

        async def once() -> list[Any]:
            pipe = self.client.pipeline(transaction=False)  # anew each time: it forgets its commands when it fails
            for command in commands:
                pipe.execute_command(*command)
            return await pipe.execute()

        return await self.call(once) if commands else []

    async def check_version(self) -> str:
        """The server's version.

        :raises BusError: unreachable, or older than `MIN_VERSION`.
        """
        info = await self.call(lambda: self.client.info("server"))
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise BusError(f"redis {version} is too old: {'.'.join(map(str, MIN_VERSION))} or newer is needed")
        return version

    async def close(self) -> None:
        await self.client.aclose()
