"""A reader that deletes what was processed a little later, many entries at once.

With `appendfsync always` each ack is a synced write, and it stands in the way of the writes that somebody waits for.
For consumers that would do no harm if they saw an entry again after a restart.
"""

from collections.abc import Sequence

from shared.bus import Delivery, Reader
from shared.clock import Clock

ACK_AFTER_S = 0.25
MAX_HELD = 256


class LazyReader:
    """Wraps a `Reader`; `next` may return an empty list before its time-out, when acks are due."""

    def __init__(self, reader: Reader, clock: Clock) -> None:
        self._reader, self._clock = reader, clock
        self._held: list[Delivery] = []
        self._due = 0.0

    async def next(self, timeout_s: float | None = None) -> list[Delivery]:
        """As `Reader.next`. Acks first if that is due.

        :raises BusError: Redis is lost; nothing was taken from the stream.
        """
        if not self._held:
            return await self._reader.next(timeout_s)
        left = self._due - self._clock.now()
        if left <= 0 or len(self._held) >= MAX_HELD:
            await self.flush()
            return await self._reader.next(timeout_s)
        return await self._reader.next(left if timeout_s is None else min(left, timeout_s))

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """These have been processed; they are deleted within about `ACK_AFTER_S`."""
        if not self._held:
            self._due = self._clock.now() + ACK_AFTER_S
        self._held += deliveries

    async def flush(self) -> None:
        """Delete now what has been processed."""
        if self._held:
            await self._reader.ack(self._held)
            self._held = []
