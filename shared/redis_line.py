"""One connection to Redis: commands leave at once, one behind the other, and answers come back in that order.

redis-py's connection costs a lock, two time-outs and several turns of the event loop for each command, more than all
else that a token costs between the engine and the client. Here a command is a write and a future.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import hiredis
from redis.asyncio import ConnectionPool, SSLConnection
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

_ERRORS: dict[str, type[Exception]] = {
    "OOM": OutOfMemoryError,
    "WRONGPASS": AuthenticationError,
    "NOAUTH": AuthenticationError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "LOADING": BusyLoadingError,
    "READONLY": ReadOnlyError,
    "TRYAGAIN": TryAgainError,
    "CLUSTERDOWN": ClusterDownError,
    "MASTERDOWN": MasterDownError,
}
_NO_MORE = object()


def error_of(message: str) -> Exception:
    """Redis's answer as the exception that redis-py makes of it."""
    code, _, rest = message.partition(" ")
    if message == "ERR max number of clients reached":
        return RedisConnectionError(rest)
    if (kind := _ERRORS.get(code)) is not None:
        return kind(rest)
    return ResponseError(rest if code == "ERR" else message)


def packed(command: Sequence[Any]) -> bytes:
    """As it is sent. The name may be two words.

    :raises TypeError: an argument is not text, bytes or a number.
    """
    name, *args = command
    words = name.split() if " " in name else (name,)
    try:
        return hiredis.pack_command((*words, *args))
    except hiredis.HiredisError as exc:
        raise TypeError(str(exc)) from None


class _Call:
    """Commands sent together, whose answers are waited for together."""

    __slots__ = ("answers", "left", "reply", "sent_at")

    def __init__(self, reply: "asyncio.Future[list[Any]]", count: int, sent_at: float) -> None:
        self.reply, self.left, self.sent_at = reply, count, sent_at
        self.answers: list[Any] = []


class Line(asyncio.Protocol):
    """Answers are bytes, numbers, None, lists of these, or a `RedisError` as a value."""

    def __init__(self, timeout_s: float) -> None:
        """:param timeout_s: if calls wait and nothing comes for so long, the line is given up."""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._parser = hiredis.Reader(replyError=error_of, notEnoughData=_NO_MORE)
        self._transport: asyncio.Transport | None = None
        self._calls: deque[_Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._heard_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and self._error is None

    def send(self, data: bytes, count: int = 1) -> "asyncio.Future[list[Any]]":
        """Send `count` packed commands: their answers, as they come. Giving up the future leaves the line as it is: the
        commands take effect, and the answers are dropped.

        The future raises RedisConnectionError or RedisTimeoutError if the line breaks first.
        """
        reply = self._loop.create_future()
        if self._transport is None or self._error is not None:
            reply.set_exception(self._error or RedisConnectionError("the connection is not open"))
            return reply
        self._transport.write(data)  # first: a write that raised must leave no call that takes another's answer
        self._calls.append(_Call(reply, count, self._loop.time()))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)
        return reply

    def close(self, error: Exception | None = None) -> None:
        """Break the connection; whoever waits is told. Idempotent."""
        self._end(error or RedisConnectionError("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        parser, self._heard_at = self._parser, self._loop.time()
        try:
            parser.feed(data)
            while (answer := parser.gets()) is not _NO_MORE:
                self._take(answer)
        except (hiredis.ProtocolError, IndexError):  # IndexError: an answer that nobody asked for
            self.close(RedisConnectionError("redis sent what is no answer"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RedisConnectionError(f"connection closed by server{f': {exc}' if exc else ''}"))

    # --- inside ---

    def _take(self, answer: Any) -> None:
        call = self._calls[0]
        call.answers.append(answer)
        call.left -= 1
        if not call.left:
            self._calls.popleft()
            if not call.reply.done():  # else its caller gave up
                call.reply.set_result(call.answers)

    def _look(self) -> None:
        """The line breaks if the eldest call has waited too long, and nothing came meanwhile."""
        self._timer = None
        if not self._calls:
            return
        left_s = max(self._calls[0].sent_at, self._heard_at) + self._timeout_s - self._loop.time()
        if left_s <= 0:
            self.close(RedisTimeoutError(f"no answer for {self._timeout_s} s"))
        else:
            self._timer = self._loop.call_later(left_s, self._look)

    def _end(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.reply.done():
                call.reply.set_exception(error)


async def open_line(pool: ConnectionPool) -> Line:
    """A new connection to where `pool`'s would go, ready for commands.

    :raises RedisConnectionError: nobody is there, or Redis refuses the user or the database.
    :raises RedisTimeoutError: nobody answers.
    """
    options = pool.connection_kwargs
    line = Line(options["socket_timeout"])
    try:
        async with asyncio.timeout(options["socket_connect_timeout"]):
            await _connect(line, pool)
            for answer in await _greet(line, options):
                if isinstance(answer, RedisConnectionError):
                    raise answer
                if isinstance(answer, Exception):
                    raise RedisConnectionError(str(answer))
    except TimeoutError:
        line.close()
        raise RedisTimeoutError("no connection in time") from None
    except OSError as exc:
        line.close()
        raise RedisConnectionError(f"cannot connect: {exc}") from exc
    except BaseException:
        line.close()
        raise
    return line


async def _connect(line: Line, pool: ConnectionPool) -> None:
    options, loop = pool.connection_kwargs, asyncio.get_running_loop()
    if "path" in options:
        await loop.create_unix_connection(lambda: line, options["path"])
        return
    maker = pool.make_connection()
    context = maker.ssl_context.get() if isinstance(maker, SSLConnection) else None
    host, port = options.get("host", "localhost"), options.get("port", 6379)
    await loop.create_connection(lambda: line, host, port, ssl=context)


async def _greet(line: Line, options: dict[str, Any]) -> list[Any]:
    """Who we are, and which database we want."""
    commands: list[tuple[Any, ...]] = []
    user, password = options.get("username"), options.get("password")
    if user:
        commands.append(("AUTH", user, password or ""))
    elif password:
        commands.append(("AUTH", password))
    if name := options.get("client_name"):
        commands.append(("CLIENT", "SETNAME", name))
    if db := options.get("db"):
        commands.append(("SELECT", int(db)))
    return await line.send(b"".join(map(packed, commands)), len(commands)) if commands else []
