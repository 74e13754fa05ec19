"""The gateway's way to the workers: leases, its token stream, and who is alive."""

from collections.abc import Awaitable, Callable, Sequence

from services.gateway.ports import Admission
from shared.bus import Bus, Delivery
from shared.clock import Clock
from shared.errors import BusError
from shared.ids import Incarnation, RequestId
from shared.keys import Keys
from shared.lazy_reader import LazyReader
from shared.leases import AdmitAnswer, Leases, RecordState
from shared.messages import GatewayMsg, GenerateRequest, Registration
from shared.roster import Roster

MAX_GREETINGS = 3
WORKERS_FRESH_S = 0.5
"""How old the list of live workers may be: it decides 503, limits and the block size, not placement."""


class RedisRequestPort:
    """Implements `RequestPort` and `Registry` of `services.gateway.ports`."""

    def __init__(
        self,
        incarnation: Incarnation,
        leases: Leases,
        roster: Roster,
        bus: Bus,
        keys: Keys,
        clock: Clock,
        max_queued: int,
    ) -> None:
        self._leases, self._roster, self._clock, self._max_queued = leases, roster, clock, max_queued
        self._incarnation = incarnation
        self._reader = LazyReader(bus.reader(keys.tokens(incarnation)), clock)
        self._unacked: list[Delivery] = []
        self._workers: list[Registration] = []
        self._workers_at: float | None = None

    async def admit(self, request: GenerateRequest) -> Admission:
        return await self._known(lambda: self._leases.admit(request, self._max_queued))

    async def readmit(self, request: GenerateRequest, epoch: int, *outputs: Sequence[int]) -> Admission:
        return await self._known(lambda: self._leases.readmit(request, epoch, *outputs))

    async def greet(self) -> bool:
        return await self._roster.greet(self._incarnation)

    async def states(self, request_ids: Sequence[RequestId]) -> list[RecordState]:
        return await self._leases.states(request_ids)

    async def queued(self, request_ids: Sequence[RequestId]) -> list[bool]:
        return await self._leases.are_queued(request_ids)

    async def _known(self, admit: Callable[[], Awaitable[AdmitAnswer]]) -> Admission:
        """Admit; where Redis does not know this gateway, greet and try again."""
        for _ in range(MAX_GREETINGS):
            answer = await admit()
            if answer != "unknown":
                return answer
            await self._roster.greet(self._incarnation)
        raise BusError("redis forgets this gateway again and again")

    async def cancel(self, request_id: RequestId, reason: str) -> None:
        await self._leases.cancel(request_id, reason)

    async def cancel_choice(self, request_id: RequestId, epoch: int, choice: int) -> None:
        await self._leases.cancel_choice(request_id, epoch, choice)

    async def token_log(self, request_id: RequestId, choice: int) -> tuple[int, ...]:
        return await self._leases.token_log(request_id, choice)

    async def next_events(self) -> list[GatewayMsg]:
        """What came since the last call; none at all where it was only time to delete something. Entries of the last
        call are deleted a little later: a gateway that sees one again drops it."""
        done, self._unacked = self._unacked, []
        self._reader.ack(done)
        self._unacked = await self._reader.next()
        return [message for delivery in self._unacked for message in delivery.messages]

    async def workers(self) -> list[Registration]:
        """Live workers that take new work; at most `WORKERS_FRESH_S` old, older only while Redis is away."""
        now = self._clock.now()
        if self._workers_at is None or now - self._workers_at > WORKERS_FRESH_S:
            try:
                views = await self._roster.workers()
            except BusError:
                if self._workers_at is None:
                    raise
                return self._workers
            self._workers = [view.registration for view in views if view.alive and not view.draining]
            self._workers_at = now
        return self._workers
