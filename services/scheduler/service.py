"""The scheduler as a service. The life of a request here:

queued      `Admitted` came in (or the queue in Redis was read); its numbers wait in the queue
asked       it is at the head, fits somewhere, and the index was asked for its prefix
dispatched  one script took credit and wrote the tasks; the ledger counts it
ended       `Ended` came in; or the reaper found it lost, and it is queued again at the next epoch
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
import structlog

from services.scheduler.dispatcher import Dispatcher
from services.scheduler.hints import PrefixHints
from services.scheduler.intake import Intake
from services.scheduler.ledger import Ledger
from services.scheduler.ports import LastOutage, Requests, Workers
from services.scheduler.reaper import Reaper
from services.scheduler.waiting import WaitingQueue
from services.scheduler.wakeup import Wakeup
from shared.bus import Bus, RedisBus
from shared.clock import Clock
from shared.config import LeaseConfig, SchedulerConfig
from shared.errors import BusError
from shared.health import Probes, excused, serve_http
from shared.ids import Incarnation
from shared.keys import Keys
from shared.leases import Leases
from shared.metrics import Metrics
from shared.process import Process
from shared.randomness import Randomness
from shared.roster import Roster

log = structlog.get_logger(__name__)

MAX_WAITING = 4096
"""Requests kept here with their hashes; what is beyond waits in Redis."""
OVERDUE_S = 15.0
"""Without a completed look of the reaper for so long, the service is not healthy."""

COUNTERS = (
    *("num_dispatched", "num_handoffs", "num_failed", "num_buried", "num_requeued", "num_given_up"),
    "num_gateways_buried",
    *("num_hints_asked", "num_hints_unanswered"),
)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    num_waiting: int
    num_in_flight: int
    num_workers: int  # that take new work
    num_dispatched: int
    num_handoffs: int  # dispatches with a prefill worker
    num_failed: int  # no worker could ever have served them
    num_buried: int
    num_requeued: int
    num_given_up: int  # failed after too many attempts
    num_gateways_buried: int
    num_hints_asked: int
    num_hints_unanswered: int
    num_stream_entries: dict[str, int]  # not consumed yet, by stream


class Scheduler:
    """Puts the owners together. One per cell leads; it ends when another one takes over."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        requests: Requests,
        workers: Workers,
        incarnation: Incarnation,
        clock: Clock,
        randomness: Randomness,
        last_outage: LastOutage,
        config: SchedulerConfig,
        lease: LeaseConfig,
    ) -> None:
        self._requests, self._incarnation, self._clock, self._lease = requests, incarnation, clock, lease
        wakeup = Wakeup(clock)
        self.ledger = Ledger()
        self.waiting = WaitingQueue(MAX_WAITING, clock, config.priority_level_s)
        self.hints = PrefixHints(bus, keys, incarnation, clock, config.index_timeout_s)
        self.dispatcher = Dispatcher(
            requests, workers, self.ledger, self.waiting, self.hints, wakeup, clock, randomness, config
        )
        self.intake = Intake(bus, keys, requests, self.ledger, self.waiting, self.dispatcher, wakeup, clock)
        self.reaper = Reaper(
            *(requests, workers, bus, keys, self.ledger, self.dispatcher, wakeup, clock, last_outage, config, lease)
        )

    async def run(self, *, started: Callable[[], None] = lambda: None) -> None:
        """Take leadership and serve for ever.

        :raises Deposed: (in a group) another scheduler has taken over.
        """
        await self._take_over()
        started()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.intake.run)
            tasks.start_soon(self.hints.listen)
            tasks.start_soon(self.dispatcher.run, self._lease.heartbeat_s)
            tasks.start_soon(self.reaper.run)

    async def _take_over(self) -> None:
        while True:
            try:
                term = await self._requests.lead(self._incarnation)
                await self.dispatcher.start(term)
                await self.intake.resync()
            except BusError as exc:
                log.warning("scheduler.waits", error=str(exc))
                await self._clock.sleep(self._lease.heartbeat_s)
            else:
                log.info("scheduler.leads", term=term, queued=len(self.waiting), workers=self.ledger.num_workers)
                return

    def stats(self) -> SchedulerStats:
        reaped = self.reaper.stats()
        return SchedulerStats(
            num_waiting=len(self.waiting),
            num_in_flight=self.ledger.num_in_flight,
            num_workers=self.ledger.num_workers,
            num_dispatched=self.dispatcher.num_dispatched,
            num_handoffs=self.dispatcher.num_handoffs,
            num_failed=self.dispatcher.num_failed,
            num_buried=reaped.num_buried,
            num_requeued=reaped.num_requeued,
            num_given_up=reaped.num_failed,
            num_gateways_buried=reaped.num_gateways_buried,
            num_stream_entries=dict(self.reaper.stream_lengths),
            num_hints_asked=self.hints.num_asked,
            num_hints_unanswered=self.hints.num_unanswered,
        )

    def health(self) -> tuple[bool, dict[str, object]]:
        """Well while the reaper comes round and the dispatcher is not stuck inside a pump."""
        idle_s = self._clock.now() - min(self.reaper.last_look, self.dispatcher.last_pump)
        return idle_s < OVERDUE_S, {"seconds_since_progress": round(idle_s, 1), "waiting": len(self.waiting)}


async def serve(process: Process) -> None:
    """The process's main: until SIGTERM, or until another scheduler leads."""
    settings = process.settings
    bus = RedisBus(process.link, process.clock)
    leases = Leases(process.link, process.keys, process.randomness)
    roster = Roster(process.link, process.keys, settings.lease.heartbeat_s)
    scheduler = Scheduler(
        *(bus, process.keys, leases, roster, process.incarnation, process.clock, process.randomness),
        *(lambda: process.link.last_outage, settings.scheduler, settings.lease),
    )
    ready = anyio.Event()
    metrics = Metrics("scheduler")
    metrics.stats(scheduler.stats, counters=COUNTERS)
    probes = Probes(health=excused(scheduler.health, process.link), ready=lambda: (ready.is_set(), {}), metrics=metrics)
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_http, settings.scheduler.host, settings.scheduler.port, probes)
        log.info("service.listening", port=port)
        tasks.start_soon(partial(scheduler.run, started=ready.set))
        await process.stopping.wait()
        tasks.cancel_scope.cancel()
