"""Time, as something handed in. Rooms never import `time` or sleep by themselves, so that the whole
system can run on a virtual clock.

Monotonic times are never compared across processes; deadlines that several processes share are
Redis TIME, inside Lua.
"""

import time
from typing import Protocol

import anyio


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary start."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch: for what a person reads, never for intervals."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class ManualClock:
    """A clock that moves only when told: `advance` wakes the sleepers in order of their deadlines."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, anyio.Event]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        event = anyio.Event()
        self._sleepers.append((self._now + seconds, event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        """Move the clock forward and wake whoever is due."""
        self._now += seconds
        due = sorted((s for s in self._sleepers if s[0] <= self._now), key=lambda s: s[0])
        self._sleepers = [s for s in self._sleepers if s[0] > self._now]
        for _, event in due:
            event.set()
