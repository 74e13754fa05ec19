"""What comes in on the scheduler's stream, and what Redis still has queued.

Messages only wake and correct: each one may be lost or repeated, as the queue in Redis is read again now and then.
"""

from collections.abc import Sequence

import anyio
import structlog

from services.scheduler.dispatcher import Dispatcher
from services.scheduler.ledger import Ledger
from services.scheduler.ports import Requests
from services.scheduler.waiting import WaitingQueue, waiting_of
from services.scheduler.wakeup import Wakeup
from shared.bus import Bus, Delivery
from shared.clock import Clock
from shared.errors import BusError
from shared.keys import Keys
from shared.lazy_reader import LazyReader
from shared.messages import (
    Admitted,
    CreditFreed,
    Ended,
    RequestState,
    SchedulerMsg,
    WorkerDraining,
    WorkerJoined,
)

log = structlog.get_logger(__name__)

LOADS_AT_ONCE = 16
RESYNC_EVERY_S = 5.0


class Intake:
    """Feeds queue and ledger."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        requests: Requests,
        ledger: Ledger,
        waiting: WaitingQueue,
        dispatcher: Dispatcher,
        wakeup: Wakeup,
        clock: Clock,
    ) -> None:
        self._reader = LazyReader(bus.reader(keys.sched()), clock)
        self._requests, self._ledger, self._waiting = requests, ledger, waiting
        self._dispatcher, self._wakeup, self._clock = dispatcher, wakeup, clock
        self._synced = float("-inf")
        self._left_in_redis = False

    async def run(self) -> None:
        """Take in messages for ever. What could not be applied is applied again: all of it is idempotent."""
        deliveries: list[Delivery] = []
        while True:
            try:
                deliveries = deliveries or await self._reader.next(RESYNC_EVERY_S)
                await self.take(deliveries)
                self._reader.ack(deliveries)
                deliveries = []
                if self._resync_due():
                    await self.resync()
            except BusError as exc:
                log.warning("intake.paused", error=str(exc))
                await self._clock.sleep(1.0)

    async def resync(self) -> None:
        """Look for queued requests whose message was lost, or that did not fit into the queue."""
        self._left_in_redis = False
        missing = [a for a in await self._requests.queued() if self._waiting.epoch_of(a.request_id) < a.epoch]
        for start in range(0, len(missing), LOADS_AT_ONCE):
            if self._left_in_redis:
                break
            await self._admit(missing[start : start + LOADS_AT_ONCE])
        self._synced = self._clock.now()

    async def take(self, deliveries: Sequence[Delivery]) -> None:
        """Apply messages in order; runs of admissions are loaded together."""
        admissions: list[Admitted] = []
        for message in (m for delivery in deliveries for m in delivery.messages):
            if isinstance(message, Admitted):
                admissions.append(message)
                continue
            await self._admit(admissions)
            admissions = []
            self._apply(message)
        await self._admit(admissions)

    def _apply(self, message: SchedulerMsg) -> None:
        match message:
            case Ended(request_id=request_id):
                self._ledger.forget(request_id)
                self._waiting.remove(request_id)
            case WorkerDraining(incarnation=incarnation):
                self._ledger.drain(incarnation)
            case WorkerJoined(incarnation=incarnation):
                log.info("worker.joined", worker=incarnation)
            case CreditFreed():
                pass
        self._dispatcher.refresh_wanted = True
        self._wakeup.ring()

    async def _admit(self, admissions: Sequence[Admitted]) -> None:
        """Load and queue, in the order given. What is in flight already is a repeat."""
        fresh = [a for a in admissions if self._ledger.epoch_of(a.request_id) < a.epoch]
        for start in range(0, len(fresh), LOADS_AT_ONCE):
            batch = fresh[start : start + LOADS_AT_ONCE]
            for admitted, state in zip(batch, await self._load(batch), strict=True):
                if state is None or self._ledger.epoch_of(admitted.request_id) >= admitted.epoch:
                    continue
                self._ledger.forget(admitted.request_id)
                if state.epoch == admitted.epoch:
                    self._queue(state)
            self._wakeup.ring()

    async def _load(self, batch: Sequence[Admitted]) -> list[RequestState | None]:
        """Aligned with `batch`; None where a request has ended.

        :raises BusError: Redis is lost.
        """
        states: list[RequestState | None] = [None] * len(batch)
        errors: list[BusError] = []

        async def one(position: int) -> None:
            try:
                states[position] = await self._requests.load(batch[position].request_id)
            except BusError as exc:
                errors.append(exc)

        async with anyio.create_task_group() as tasks:
            for position in range(len(batch)):
                tasks.start_soon(one, position)
        if errors:
            raise errors[0]
        return states

    def _queue(self, state: RequestState) -> None:
        if not self._waiting.push(waiting_of(state, self._ledger.block_size())):
            self._left_in_redis = True

    def _resync_due(self) -> bool:
        if self._left_in_redis and self._waiting.has_space:
            return True
        return self._clock.now() - self._synced >= RESYNC_EVERY_S
