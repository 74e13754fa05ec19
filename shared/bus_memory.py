"""The bus in one process: streams are lists, ids are counters. For unit tests and the simulation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from shared.bus import Delivery, decode_entry
from shared.clock import Clock
from shared.keys import Channel
from shared.messages import encode

M = TypeVar("M")


@dataclass
class _Stream:
    """Entries in order of their number; messages are kept encoded, as on a real wire."""

    entries: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    next_number: int = 1
    groups: dict[str, "_Group"] = field(default_factory=dict)


@dataclass
class _Group:
    last: int = 0
    pending: dict[int, tuple[str, float]] = field(default_factory=dict)  # number -> consumer, since when


class MemoryBus:
    """Same promises as `RedisBus`. `depth(channel)` is for tests: `length`, without waiting."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._changed = anyio.Event()

    async def publish(self, channel: Channel[M], *messages: M) -> None:
        stream = self._stream(channel)
        stream.entries[stream.next_number] = tuple(encode(message) for message in messages)
        stream.next_number += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        await anyio.lowlevel.checkpoint()

    def reader(self, *channels: Channel[Any]) -> "MemoryReader":
        return MemoryReader(self, channels)

    def group(self, channel: Channel[Any], group: str, consumer: str) -> "MemoryGroupReader":
        return MemoryGroupReader(self, channel, group, consumer)

    async def length(self, channel: Channel[Any]) -> int:
        await anyio.lowlevel.checkpoint()
        return self.depth(channel)

    def depth(self, channel: Channel[Any]) -> int:
        return len(self._stream(channel).entries)

    def _stream(self, channel: Channel[Any]) -> _Stream:
        return self._streams.setdefault(channel.key, _Stream())

    def _delivery(self, channel: Channel[Any], number: int) -> Delivery:
        return decode_entry(channel, f"{number}-0".encode(), self._stream(channel).entries[number])

    async def _wait_for(self, poll: Callable[[], list[Delivery]], timeout_s: float | None) -> list[Delivery]:
        """Call `poll` after every change until it gives something or the time is over."""
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        while True:
            if found := poll():
                await anyio.lowlevel.checkpoint()
                return found
            if deadline is None:
                await self._changed.wait()
                continue
            left = deadline - self._clock.now()
            if left <= 0:
                await anyio.lowlevel.checkpoint()
                return []
            await self._either(self._changed, left)

    async def _either(self, event: anyio.Event, seconds: float) -> None:
        async def sleep() -> None:
            await self._clock.sleep(seconds)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleep)
            await event.wait()
            tasks.cancel_scope.cancel()


def _number(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0])


class MemoryReader:
    def __init__(self, bus: MemoryBus, channels: Sequence[Channel[Any]]) -> None:
        assert channels
        self._bus, self._channels = bus, channels
        self._last = {channel.key: 0 for channel in channels}

    async def next(self, timeout_s: float | None = None) -> list[Delivery]:
        return await self._bus._wait_for(self._poll, timeout_s)

    def _poll(self) -> list[Delivery]:
        out: list[Delivery] = []
        for channel in self._channels:
            for number in list(self._bus._stream(channel).entries):
                if number > self._last[channel.key]:
                    out.append(self._bus._delivery(channel, number))
                    self._last[channel.key] = number
        return out

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._bus._stream(delivery.channel).entries.pop(_number(delivery.entry_id), None)
        await anyio.lowlevel.checkpoint()


class MemoryGroupReader:
    def __init__(self, bus: MemoryBus, channel: Channel[Any], group: str, consumer: str) -> None:
        self._bus, self._channel, self._consumer = bus, channel, consumer
        self._group = bus._stream(channel).groups.setdefault(group, _Group())

    async def next(self, timeout_s: float | None = None) -> list[Delivery]:
        return await self._bus._wait_for(self._poll, timeout_s)

    def _poll(self) -> list[Delivery]:
        fresh = [n for n in self._bus._stream(self._channel).entries if n > self._group.last]
        for number in fresh:
            self._group.pending[number] = (self._consumer, self._bus._clock.now())
            self._group.last = number
        return [self._bus._delivery(self._channel, number) for number in fresh]

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            number = _number(delivery.entry_id)
            self._group.pending.pop(number, None)
            self._bus._stream(self._channel).entries.pop(number, None)
        await anyio.lowlevel.checkpoint()

    async def reclaim(self, min_idle_s: float) -> list[Delivery]:
        await anyio.lowlevel.checkpoint()
        now = self._bus._clock.now()
        due = [n for n, (_, since) in self._group.pending.items() if now - since >= min_idle_s]
        entries = self._bus._stream(self._channel).entries
        for number in due:
            self._group.pending[number] = (self._consumer, now)
        return [self._bus._delivery(self._channel, number) for number in due if number in entries]
