"""Typed streams between services: publish, blocking consume, ack, reclaim.

Producers never trim; the consumer deletes what it has processed (`ack`). A reader that dies before its ack finds the
same entries again, so consumers are idempotent.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from shared.clock import Clock
from shared.errors import BusError
from shared.keys import Channel
from shared.messages import encode
from shared.redis_link import MAX_BLOCK_S, RedisLink

log = structlog.get_logger(__name__)
M = TypeVar("M")
T = TypeVar("T")
FIELD = b"m"
"""Field name of an item; one entry may hold several."""
LOOK_AGAIN_S = 1.0
"""A reader begins at the start of its streams so often: one that was lost and made anew under a clock that is behind
has ids before those that the reader has seen. What is found again there is what the reader has not deleted yet."""


@dataclass(frozen=True)
class Delivery:
    """One stream entry. Items that no decoder understands are left out, logged and counted."""

    channel: Channel[Any]
    entry_id: bytes
    messages: tuple[Any, ...]


class Reader(Protocol):
    async def next(self, timeout_s: float | None = None) -> list[Delivery]:
        """Entries not given out before, in the order of the reader's channels, then of their ids; waits for at
        least one. An empty list after `timeout_s`."""
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Delete what has been processed."""
        ...


class GroupReader(Reader, Protocol):
    async def reclaim(self, min_idle_s: float) -> list[Delivery]:
        """Take over entries that another consumer of the group got and did not ack for so long."""
        ...


class Bus(Protocol):
    async def publish(self, channel: Channel[M], *messages: M) -> None:
        """Append one entry with these messages."""
        ...

    async def length(self, channel: Channel[Any]) -> int:
        """Entries that nobody has deleted yet."""
        ...

    def reader(self, *channels: Channel[Any]) -> Reader:
        """The only consumer of these streams; begins with the oldest entry. Earlier channels come first."""
        ...

    def group(self, channel: Channel[Any], group: str, consumer: str) -> GroupReader:
        """One of several consumers of a stream; each entry goes to one of them."""
        ...


def decode_entry(channel: Channel[Any], entry_id: bytes, fields: Sequence[bytes]) -> Delivery:
    """`fields` are the values of an entry, in order."""
    messages = []
    for raw in fields:
        try:
            messages.append(channel.decode(raw))
        except msgspec.DecodeError as exc:
            log.error("bus.undecodable", channel=channel.key, entry=entry_id.decode(), error=str(exc))
    return Delivery(channel, entry_id, tuple(messages))


class RedisBus:
    """The bus over Redis streams."""

    def __init__(self, link: RedisLink, clock: Clock) -> None:
        self._link, self._clock = link, clock

    async def publish(self, channel: Channel[M], *messages: M) -> None:
        args: list[Any] = ["XADD", channel.key, "*"]
        for message in messages:
            args += (FIELD, encode(message))
        if channel.ttl_s is None:
            await self._link.call(lambda: self._link.client.execute_command(*args))
        else:
            await self._link.batch([args, ("PEXPIRE", channel.key, int(channel.ttl_s * 1000))])

    async def length(self, channel: Channel[Any]) -> int:
        return await self._link.call(lambda: self._link.client.xlen(channel.key))

    def reader(self, *channels: Channel[Any]) -> "RedisReader":
        return RedisReader(self._link, self._clock, channels)

    def group(self, channel: Channel[Any], group: str, consumer: str) -> "RedisGroupReader":
        return RedisGroupReader(self._link, self._clock, channel, group, consumer)


class RedisReader:
    """The only consumer of its streams. Blocking reads are bounded and repeated."""

    def __init__(self, link: RedisLink, clock: Clock, channels: Sequence[Channel[Any]]) -> None:
        assert channels
        self._link, self._clock = link, clock
        self._channels = {channel.key.encode(): channel for channel in channels}
        self._last = dict.fromkeys(self._channels, b"0-0")
        self._outages, self._began_at = link.outages, clock.now()  # at the last look from the start
        self._given: set[tuple[bytes, bytes]] = set()  # (key, id) of what was given out and is not acked

    async def next(self, timeout_s: float | None = None) -> list[Delivery]:
        until = None if timeout_s is None else self._clock.now() + timeout_s
        while True:
            left_s = None if until is None else max(0.0, until - self._clock.now())
            reply = await blocking(self._link, self._clock, self._command, left_s)
            found = dict(reply)
            out: list[Delivery] = []
            for key, channel in self._channels.items():
                for entry_id, fields in found.get(key, ()):
                    self._last[key] = entry_id
                    if (key, entry_id) not in self._given:
                        self._given.add((key, entry_id))
                        out.append(decode_entry(channel, entry_id, fields[1::2]))
            if out or not reply:
                return out

    def _command(self, block_ms: int) -> list[Any]:
        """The read to send now. An outage is a sign that the streams may be others, but not a sure one: a process that
        stood still, or was between two commands, finds the next connection open."""
        now = self._clock.now()
        if self._outages != self._link.outages or now - self._began_at >= LOOK_AGAIN_S:
            self._outages, self._began_at = self._link.outages, now
            self._last = dict.fromkeys(self._last, b"0-0")
        block_ms = max(1, min(block_ms, int(1000 * (self._began_at + LOOK_AGAIN_S - now))))
        return ["XREAD", "COUNT", 256, "BLOCK", block_ms, "STREAMS", *self._last, *self._last.values()]

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        by_key: dict[str, list[bytes]] = {}
        for delivery in deliveries:
            by_key.setdefault(delivery.channel.key, []).append(delivery.entry_id)
        for key, ids in by_key.items():
            await self._link.call(lambda k=key, i=ids: self._link.client.execute_command("XDEL", k, *i))
            self._given.difference_update((key.encode(), entry_id) for entry_id in ids)


class RedisGroupReader:
    """One consumer of a group. The group is made at the first read, and again should Redis have lost it."""

    def __init__(self, link: RedisLink, clock: Clock, channel: Channel[Any], group: str, consumer: str) -> None:
        self._link, self._clock, self._channel = link, clock, channel
        self._group, self._consumer = group, consumer

    async def next(self, timeout_s: float | None = None) -> list[Delivery]:
        def command(block_ms: int) -> list[Any]:
            return [
                *("XREADGROUP", "GROUP", self._group, self._consumer),
                *("COUNT", 64, "BLOCK", block_ms, "STREAMS", self._channel.key, ">"),
            ]

        reply = await self._with_group(lambda: blocking(self._link, self._clock, command, timeout_s))
        return self._decode(reply[0][1]) if reply else []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        ids = [delivery.entry_id for delivery in deliveries]
        if ids:
            run, key = self._link.client.execute_command, self._channel.key
            await self._link.call(lambda: run("XACK", key, self._group, *ids))
            await self._link.call(lambda: run("XDEL", key, *ids))

    async def reclaim(self, min_idle_s: float) -> list[Delivery]:
        args = ("XAUTOCLAIM", self._channel.key, self._group, self._consumer, int(min_idle_s * 1000), "0-0")
        reply = await self._with_group(lambda: self._link.call(lambda: self._link.client.execute_command(*args)))
        return self._decode(entry for entry in reply[1] if entry and entry[1])

    def _decode(self, entries: Iterable[Any]) -> list[Delivery]:
        return [decode_entry(self._channel, entry_id, fields[1::2]) for entry_id, fields in entries]

    async def _with_group(self, command: Callable[[], Awaitable[T]]) -> T:
        return await with_group(self._link, self._channel.key, self._group, command)


async def with_group(link: RedisLink, key: str, group: str, command: Callable[[], Awaitable[T]]) -> T:
    """Run a command of a consumer group; the group is made, from the oldest entry, if there is none."""
    try:
        return await command()
    except BusError as exc:
        if "NOGROUP" not in str(exc):
            raise
    create = ("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
    try:
        await link.call(lambda: link.client.execute_command(*create))
    except BusError as exc:
        if "BUSYGROUP" not in str(exc):
            raise
    return await command()


async def blocking(
    link: RedisLink, clock: Clock, command: Callable[[int], list[Any]], timeout_s: float | None
) -> list[Any]:
    """Repeat a bounded blocking command until it gives something or the caller's time is over."""
    deadline = None if timeout_s is None else clock.now() + timeout_s
    while True:
        left = MAX_BLOCK_S if deadline is None else min(MAX_BLOCK_S, deadline - clock.now())
        block_ms = max(1, int(left * 1000))
        reply = await link.call(lambda ms=block_ms: link.client.execute_command(*command(ms)))  # each try anew
        if reply:
            return reply
        if deadline is not None and clock.now() >= deadline:
            return []
