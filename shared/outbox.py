"""What a worker says about its requests, in order, beside the engine loop: the next step computes while the last
one's tokens go out. One entry per gateway and step, never a message per seq."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from shared.ids import AttemptId, Incarnation, RequestId
from shared.leases import Fence, Leases
from shared.messages import Finished, Tokens

log = structlog.get_logger(__name__)
MAX_TOGETHER = 32
"""Parcels delivered at once."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A request's end, as `Leases.complete` wants it."""

    fence: Fence
    gateway: Incarnation
    finished: Finished
    decode: Incarnation
    prefill: Incarnation | None = None


@dataclass(slots=True)
class Parcel:
    """All that one step has to say: tokens first, then ends."""

    tokens: dict[Incarnation, list[tuple[Tokens, AttemptId]]] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)

    def add(self, gateway: Incarnation, tokens: Tokens, attempt: AttemptId) -> None:
        self.tokens.setdefault(gateway, []).append((tokens, attempt))

    def extend(self, later: "Parcel") -> None:
        """Take in a later step's. A request that has ended says nothing more, so ends may still come last."""
        for gateway, items in later.tokens.items():
            self.tokens.setdefault(gateway, []).extend(items)
        self.endings += later.endings

    def __bool__(self) -> bool:
        return bool(self.tokens or self.endings)


class Outbox:
    """Sends parcels in order. `on_stale(request_id, epoch)` is called for work that is no longer this worker's."""

    def __init__(self, leases: Leases, on_stale: Callable[[RequestId, int], None]) -> None:
        self._leases, self._on_stale = leases, on_stale
        self._parcels: deque[Parcel] = deque()
        self._came = asyncio.Event()  # one for all waits: a new one for each parcel would cost more than all else here
        self.num_stale = 0
        self._delivering = 0

    @property
    def num_waiting(self) -> int:
        """Parcels not yet delivered, the one under way included."""
        return len(self._parcels) + self._delivering

    def put(self, parcel: Parcel) -> None:
        """Queue a parcel; never blocks."""
        if parcel:
            self._parcels.append(parcel)
            self._came.set()

    def close(self) -> None:
        """Drop what waits."""
        self._parcels.clear()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            if not self._parcels:
                self._came.clear()
                await self._came.wait()
                continue
            parcel = self._parcels.popleft()
            self._delivering = 1
            while self._parcels and self._delivering < MAX_TOGETHER:  # the engine may be faster than Redis
                parcel.extend(self._parcels.popleft())
                self._delivering += 1
            await self._deliver(parcel)
            self._delivering = 0

    async def _deliver(self, parcel: Parcel) -> None:
        for gateway, items in parcel.tokens.items():
            alive = await self._leases.emit(gateway, items)
            pairs = zip(items, alive, strict=True)
            for request_id, epoch in {(tokens.request_id, tokens.epoch): None for (tokens, _), ok in pairs if not ok}:
                self._stale(request_id, epoch)
        for ending in parcel.endings:
            fence = ending.fence
            ok = await self._leases.complete(fence, ending.gateway, ending.finished, ending.decode, ending.prefill)
            if not ok:
                self._stale(fence.request_id, fence.epoch)

    def _stale(self, request_id: RequestId, epoch: int) -> None:
        self.num_stale += 1
        log.info("outbox.stale", request_id=request_id, epoch=epoch)
        self._on_stale(request_id, epoch)
