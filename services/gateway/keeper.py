"""Keeps the gateway and its requests known to Redis.

A gateway greets like a worker sends heartbeats: one that falls silent is buried, its requests cancelled and its stream
deleted. And it looks after what it has open: a request that Redis has lost (an empty or older Redis took over) is
admitted again under the same id, with the tokens already received; one that ended without a word is failed; one that
has waited too long for a worker is refused.
"""

import math
from collections.abc import Sequence

import structlog

from services.gateway.ports import Registry
from services.gateway.streams import RequestStream, Streams
from shared.clock import Clock
from shared.config import LeaseConfig
from shared.errors import BusError
from shared.ids import RequestId

log = structlog.get_logger("gateway.keeper")


class Keeper:
    """Beats, and compares."""

    def __init__(
        self,
        registry: Registry,
        streams: Streams,
        clock: Clock,
        lease: LeaseConfig,
        queue_timeout_s: float = math.inf,
    ) -> None:
        self._registry, self._streams, self._clock, self._lease = registry, streams, clock, lease
        self._queue_timeout_s = queue_timeout_s
        self._looked = clock.now()
        self._ended: set[RequestId] = set()  # by Redis' word at the last look, and still open here
        self.num_readmitted = 0

    async def run(self) -> None:
        """Greet and look after the requests, until cancelled."""
        while True:
            try:
                await self.look()
            except BusError as exc:
                log.warning("keeper.paused", error=str(exc))
            await self._clock.sleep(self._lease.heartbeat_s)

    async def look(self) -> None:
        """One round.

        :raises BusError: Redis is lost.
        """
        unknown = await self._registry.greet()
        if unknown or self._clock.now() - self._looked >= self._lease.lease_s:
            self._looked = self._clock.now()
            await self._compare(self._streams.admitted())
        await self._expire()

    async def _expire(self) -> None:
        """Nobody waits in the queue for ever. A durable request does: its client set a deadline, or wants none."""
        before = self._clock.now() - self._queue_timeout_s
        late = [s for s in self._streams.admitted() if s.arrived_at < before and not s.token_ids and not s.durable]
        if not late:
            return
        queued = await self._registry.queued([stream.request_id for stream in late])
        for stream, still in zip(late, queued, strict=True):
            if still and stream.is_open:
                log.warning("request.waited_too_long", request_id=stream.request_id, limit_s=self._queue_timeout_s)
                stream.refuse("queue_timeout")

    async def _compare(self, streams: Sequence[RequestStream]) -> None:
        states = await self._registry.states([stream.request_id for stream in streams])
        ended = {s.request_id for s, state in zip(streams, states, strict=True) if state == "ended" and s.is_open}
        for stream, state in zip(streams, states, strict=True):
            if not stream.is_open:
                continue
            if state == "lost":
                await self._readmit(stream)
            elif stream.request_id in ended & self._ended:  # its last events had a whole look's time to arrive
                log.error("request ended without a word", request_id=stream.request_id)
                stream.fail("the request's end was lost")
        self._ended = ended

    async def _readmit(self, stream: RequestStream) -> None:
        assert stream.request is not None
        epoch = stream.epoch + 1
        answer = await self._registry.readmit(stream.request, epoch, *stream.outputs)
        if answer != "full":  # a duplicate is this same admission, sent twice
            stream.epoch = max(stream.epoch, epoch)  # whoever worked on it before is not believed any more
            self.num_readmitted += 1
            log.warning("request.readmitted", request_id=stream.request_id, tokens=len(stream.token_ids))
