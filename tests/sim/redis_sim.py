"""Redis as a process of the simulation: latency, outages, lost answers, blocking reads, all on virtual time.

A command takes effect at one moment, some time after it was sent and some time before its answer comes; whoever sent
it may be cancelled, frozen or dead meanwhile. Commands of one process overtake each other, as over a pool of
connections.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from random import Random
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis_link import SOCKET_TIMEOUT_S
from shared.scripts import sources
from tests.sim.loop import Handle, VirtualLoop
from tests.sim.lua import evaluate
from tests.sim.redis_store import Store, raw
from tests.sim.redis_streams import Refused

SCRIPTS = sources()
_NAMES = {sha1(text.encode()).hexdigest(): name for name, text in SCRIPTS.items()}
_BY_TEXT = {text: name for name, text in SCRIPTS.items()}
_DIGEST = {name: digest for digest, name in _NAMES.items()}
_NOBODY: "dict[Reply, Blocked]" = {}

Reply = asyncio.Future[Any]
Observer = Callable[[str, Sequence[Any], Sequence[Any], Any], None]
"""Told of each script that ran: name, keys, args, answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A read that blocks: what to execute, and where entries must come for it to be worth another look."""

    keys: Collection[bytes]
    ms: int
    look: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Blocked:
    """A reader that waits for entries."""

    client: "SimClient"
    reply: Reply
    read: Read
    timer: Handle = field(init=False)


@dataclass(slots=True)
class Network:
    """What may go wrong between a process and Redis; moved by the faults."""

    lose_reply_p: float = 0.0
    slow_p: float = 0.2
    latency_s: float = 0.0003


@dataclass(frozen=True, slots=True)
class Delay:
    """The next call of a script by a client takes so long to arrive."""

    script: str
    seconds: float
    sent: Callable[[], object]  # told when it is on its way


class SimRedis:
    """The server. `observers` see every script, in the order of their effects."""

    def __init__(self, loop: VirtualLoop, rng: Random, overrides: dict[str, str] | None = None) -> None:
        self._loop, self._random = loop, rng.random
        self._texts = SCRIPTS | (overrides or {})
        self._known: set[str] = set()
        self.store = Store(lambda: loop.time() + self.time_jump)
        self.time_jump = 1_700_000_000.0
        self.network = Network()
        self.down = False
        self.observers: list[Observer] = []
        self.filters: list[Callable[[bytes, Sequence[Any]], bool]] = []  # False: the XADD is swallowed
        self.delays: dict[SimClient, Delay] = {}
        self.num_commands = 0
        self.failed_scripts: list[str] = []  # none may ever fail
        self._blocked: dict[bytes, dict[Reply, Blocked]] = {}  # by the keys that they wait for
        self._open: dict[Reply, None] = {}

    # --- faults ---

    def stop(self) -> None:
        """Every open connection breaks; what was not executed yet never is."""
        self.down = True
        self._known.clear()
        for waiting in self._blocked.values():
            for blocked in waiting.values():
                blocked.timer.cancel()
        self._blocked.clear()
        unanswered, self._open = self._open, {}
        for reply in unanswered:
            _fail(reply, RedisConnectionError("connection closed by server"))

    def start(self) -> None:
        """All that was executed is there again."""
        self.down = False

    def wipe(self) -> None:
        """All is lost: an empty server took over."""
        self.store.data.clear()
        self.store.deadlines.clear()

    # --- from clients ---

    def send(self, client: "SimClient", execute: Callable[..., Any] | Read, *args: Any) -> Reply:
        """A command on its way."""
        loop, network = self._loop, self.network
        reply: Reply = loop.create_future()
        if self.down or client.severed:
            loop.strike(0.001, _fail, reply, RedisConnectionError("connection refused"))
            return reply
        if client.partitioned:
            loop.strike(SOCKET_TIMEOUT_S, _fail, reply, RedisTimeoutError("time-out"))
            client.hanging.append(reply)
            return reply
        self._open[reply] = None
        delay = self._random() * network.latency_s
        if self._random() < network.slow_p:
            delay *= 10
        if self.delays and client in self.delays:
            delay += self._delayed(client, args)
        loop.strike(delay, self._execute, client, reply, execute, args)
        return reply

    def _delayed(self, client: "SimClient", args: tuple[Any, ...]) -> float:
        late = self.delays[client]
        if not args or not isinstance(args[0], str) or _NAMES.get(args[0]) != late.script:
            return 0.0
        del self.delays[client]
        late.sent()
        return late.seconds

    def block(self, client: "SimClient", reply: Reply, read: Read) -> None:
        """Answer when entries come, or with nothing after the time."""
        self._open[reply] = None
        blocked = Blocked(client, reply, read)
        blocked.timer = self._loop.strike(read.ms / 1000, self._unblock, blocked)
        for key in read.keys:
            self._blocked.setdefault(key, {})[reply] = blocked

    def _execute(
        self, client: "SimClient", reply: Reply, execute: Callable[..., Any] | Read, args: tuple[Any, ...]
    ) -> None:
        if self._open.pop(reply, False) is False:
            return  # the server went down before it read the command
        self.num_commands += 1
        read = execute if type(execute) is Read else None
        try:
            answer = execute(*args) if read is None else read.look(*read.args)  # type: ignore[operator]
        except Refused as exc:
            _fail(reply, ResponseError(str(exc)))
            return
        except NoScriptError as exc:
            _fail(reply, exc)
            return
        if answer is None and read is not None:
            self.block(client, reply, read)
        elif self.network.lose_reply_p and self._random() < self.network.lose_reply_p:
            _fail(reply, RedisConnectionError("connection reset"))
        else:
            self._reply(client, reply, answer)
        if self.store.added:
            self._serve_blocked()

    def _reply(self, client: "SimClient", reply: Reply, answer: Any) -> None:
        """What is sent into a partition is lost there."""
        if client.partitioned:
            client.hanging.append(reply)
        elif not reply.done():
            reply.set_result(answer)

    def _unblock(self, blocked: Blocked) -> None:
        self._drop(blocked)
        if not blocked.reply.done():
            blocked.reply.set_result(None)

    def _serve_blocked(self) -> None:
        added = list(self.store.added)
        self.store.added.clear()
        for key in added:
            for blocked in list(self._blocked.get(key, _NOBODY).values()):
                if blocked.reply.done() or blocked.client.severed:
                    self._drop(blocked)
                elif (found := blocked.read.look(*blocked.read.args)) is not None:
                    self._drop(blocked)
                    self._reply(blocked.client, blocked.reply, found)

    def _drop(self, blocked: Blocked) -> None:
        for key in blocked.read.keys:
            self._blocked[key].pop(blocked.reply, None)
        self._open.pop(blocked.reply, None)
        blocked.timer.cancel()

    # --- commands ---

    def command(self, args: Sequence[Any]) -> Any:
        if self.filters and args[0] == "XADD" and not all(keep(args[1].encode(), args) for keep in self.filters):
            return b"0-1"
        return self.store.run(*args)

    def commands(self, several: Sequence[Sequence[Any]]) -> list[Any]:
        return [self.command(args) for args in several]

    def script(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        try:
            answer = evaluate(self.store, self._texts[name], keys, args)
        except Refused as exc:
            self.failed_scripts.append(f"{name}.lua: {exc}")
            raise
        for observe in self.observers:
            observe(name, keys, args, answer)
        return answer

    def script_by_digest(self, digest: str, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        if digest not in self._known:
            raise NoScriptError("NOSCRIPT")
        return self.script(_NAMES[digest], keys, args)

    def script_by_text(self, text: str, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        name = _BY_TEXT[text]
        self._known.add(_DIGEST[name])
        return self.script(name, keys, args)


class SimClient:
    """The part of `redis.asyncio.Redis` that Baton uses, of one process.

    severed: the process is dead, nothing leaves it; partitioned: its packets vanish.
    """

    def __init__(self, server: SimRedis) -> None:
        self._server = server
        self.severed = False
        self.partitioned = False
        self.hanging: list[Reply] = []

    def rejoin(self) -> None:
        """The partition is over: what hung is reset."""
        self.partitioned = False
        for reply in self.hanging:
            _fail(reply, RedisConnectionError("connection reset"))
        self.hanging.clear()

    def execute_command(self, *args: Any) -> Reply:
        server = self._server
        if args[0] == "XREAD":
            return server.send(self, self._xread(args))
        if args[0] == "XREADGROUP":
            return server.send(self, self._xreadgroup(args))
        return server.send(self, server.command, args)

    def _xread(self, args: tuple[Any, ...]) -> Read:
        half = 6 + (len(args) - 6) // 2
        wanted = dict(zip(map(raw, args[6:half]), map(raw, args[half:]), strict=True))
        return Read(wanted, args[4], self._server.store.streams.xread, (args[2], wanted))

    def _xreadgroup(self, args: tuple[Any, ...]) -> Read:
        _, _, group, consumer, _, count, _, ms, _, key, last = args
        assert last == ">"
        stream = raw(key)
        return Read((stream,), ms, self._server.store.streams.xreadgroup, (raw(group), raw(consumer), count, stream))

    def _run(self, *args: Any) -> Reply:
        return self._server.send(self, self._server.command, args)

    def evalsha(self, digest: str, num_keys: int, *rest: Any) -> Reply:
        server = self._server
        return server.send(self, server.script_by_digest, digest, rest[:num_keys], rest[num_keys:])

    def eval(self, text: str, num_keys: int, *rest: Any) -> Reply:
        server = self._server
        return server.send(self, server.script_by_text, text, rest[:num_keys], rest[num_keys:])

    def hmget(self, key: str, *fields: str) -> Reply:
        return self._run("HMGET", key, *fields)

    def hget(self, key: str, field: str) -> Reply:
        return self._run("HGET", key, field)

    def hkeys(self, key: str) -> Reply:
        return self._run("HKEYS", key)

    def get(self, key: str) -> Reply:
        return self._run("GET", key)

    def setnx(self, key: str, value: Any) -> Reply:
        return self._run("SETNX", key, value)

    def smembers(self, key: str) -> Reply:
        return self._run("SMEMBERS", key)

    def zrangebyscore(self, key: str, low: Any, high: Any) -> Reply:
        return self._run("ZRANGEBYSCORE", key, low, high)

    def xlen(self, key: str) -> Reply:
        return self._run("XLEN", key)

    async def zrange(self, key: str, first: int, last: int, withscores: bool = False) -> Any:
        options = ("WITHSCORES",) if withscores else ()
        flat = await self._run("ZRANGE", key, first, last, *options)
        return [(m, float(s)) for m, s in zip(flat[::2], flat[1::2], strict=True)] if withscores else flat

    async def time(self) -> tuple[int, int]:
        seconds, micros = await self._run("TIME")
        return int(seconds), int(micros)

    def pipeline(self, transaction: bool = False) -> "SimPipeline":
        return SimPipeline(self, self._server)

    async def aclose(self) -> None: ...


class SimPipeline:
    """Commands that are sent together."""

    def __init__(self, client: SimClient, server: SimRedis) -> None:
        self._client, self._server = client, server
        self._commands: list[tuple[Any, ...]] = []

    def execute_command(self, *args: Any) -> None:
        self._commands.append(args)

    def execute(self) -> Reply:
        """As in redis-py, the commands are forgotten, whatever comes of it."""
        commands, self._commands = self._commands, []
        return self._server.send(self._client, self._server.commands, commands)


def _fail(reply: Reply, error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
