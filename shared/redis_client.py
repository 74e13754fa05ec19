"""redis-py's client over lines of our own (`redis_line.py`): its URLs, commands and errors, at a tenth of their cost.

All commands share one line, but those that wait in Redis: each of these has a line for itself meanwhile. `pipeline`
without a transaction is one write on the shared line. What redis-py does apart (subscriptions, transactions) goes over
its own connections.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import redis.asyncio as aioredis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from shared.redis_line import Line, open_line, packed

_WAITING = frozenset(("XREAD", "XREADGROUP", "BLPOP", "BRPOP", "BLMOVE", "BLMPOP", "BZPOPMIN", "BZPOPMAX"))
"""Commands for whose answer Redis may wait, and lets all behind them on their connection wait too."""


class LineClient(aioredis.Redis):
    """Never retries. Connects when first used, and again when used after its connection broke."""

    def __init__(self, *, connection_pool: aioredis.ConnectionPool) -> None:
        """:param connection_pool: says where Redis is; its time-outs hold."""
        connection_pool.connection_kwargs["protocol"] = 2  # what is spoken here, and so what answers look like
        super().__init__(connection_pool=connection_pool)
        self._shared: Line | None = None
        self._idle: list[Line] = []
        self._taken_lines: set[Line] = set()
        self._connecting = anyio.Lock()
        self._failure: RedisError | None = None  # of the last attempt to connect
        self._num_failures = 0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis-py.

        :raises RedisError: Redis is not there, does not answer, or refuses the command.
        """
        name = args[0]
        if name in _WAITING:
            with self._taken(await self._own_line()) as line:
                (answer,) = await line.send(packed(args))
        else:
            (answer,) = await (await self._shared_line()).send(packed(args))
        return self._finished(name, answer, options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        if transaction:
            return super().pipeline(transaction, shard_hint)
        return _Batch(self, self.connection_pool, self.response_callbacks, False, shard_hint)

    async def send_together(self, commands: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Any]:
        """The answers to commands with their options; an error is an answer too."""
        line = await self._shared_line()
        answers = await line.send(b"".join([packed(args) for args, _ in commands]), len(commands))
        pairs = zip(commands, answers, strict=True)
        return [
            answer if isinstance(answer, Exception) else self._finished(args[0], answer, options)
            for (args, options), answer in pairs
        ]

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        for line in (self._shared, *self._idle, *self._taken_lines):
            if line is not None:
                line.close()
        self._shared, self._idle = None, []
        await super().aclose(close_connection_pool)

    def _finished(self, name: str, answer: Any, options: Mapping[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        callback = self.response_callbacks.get(name)
        if callback is None:
            return answer
        return callback(answer, **{key: value for key, value in options.items() if key != "keys"})

    async def _shared_line(self) -> Line:
        """Whoever waits for another's attempt shares its outcome: no queue of attempts at a Redis that is away."""
        if self._shared is not None and self._shared.is_open:
            return self._shared
        before = self._num_failures
        async with self._connecting:
            if self._shared is not None and self._shared.is_open:  # by whom we waited for
                return self._shared
            if self._failure is not None and self._num_failures != before:
                raise self._failure.with_traceback(None)  # one for all who waited: their frames must not gather in it
            try:
                self._shared = await open_line(self.connection_pool)
            except RedisError as exc:
                self._num_failures += 1
                self._failure = exc
                raise
            self._failure = None
            return self._shared

    async def _own_line(self) -> Line:
        while self._idle:
            if (line := self._idle.pop()).is_open:
                return line
        return await open_line(self.connection_pool)

    @contextmanager
    def _taken(self, line: Line) -> Iterator[Line]:
        """A line that nobody else uses meanwhile. Who gives up breaks it, as its answer is still to come."""
        self._taken_lines.add(line)
        try:
            yield line
        except BaseException:
            line.close()
            raise
        finally:
            self._taken_lines.discard(line)
        if line.is_open:
            self._idle.append(line)


class _Batch(Pipeline):
    """Commands that are sent together, each for itself."""

    def __init__(self, client: LineClient, *args: Any) -> None:
        super().__init__(*args)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = [(args, options) for args, options in self.command_stack]
        self.command_stack = []
        answers = await self._client.send_together(commands) if commands else []
        if raise_on_error:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        return answers
