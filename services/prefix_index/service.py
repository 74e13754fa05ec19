"""The prefix index as a service: KV events in, questions in, answers and requests to resend out.

One task does all of it, in the order of the streams; events before questions, so that an answer is as fresh as can be.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import anyio
import structlog

from services.prefix_index.index import PrefixIndex
from shared.bus import Bus, Delivery, RedisBus
from shared.clock import Clock
from shared.config import PrefixIndexConfig
from shared.errors import BusError
from shared.health import Probes, excused, serve_http
from shared.ids import Incarnation
from shared.keys import Keys
from shared.lazy_reader import LazyReader
from shared.messages import KvEvents, MatchQuery, MatchReply, ResendKv, WorkerGone
from shared.metrics import Metrics
from shared.process import Process
from shared.roster import Roster, WorkerView

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0
RESEND_AFTER_S = 5.0
"""A worker that was asked to resend and has not done so is asked again."""
OVERDUE_S = 15.0
"""Without a completed round for so long, the service is not healthy."""

COUNTERS = ("num_events", "num_repeats", "num_gaps", "num_evicted", "num_queries", "num_resends")


class Workers(Protocol):
    async def workers(self) -> list[WorkerView]: ...


class IndexService:
    """Feeds a `PrefixIndex` from the bus."""

    def __init__(self, bus: Bus, keys: Keys, workers: Workers, clock: Clock, config: PrefixIndexConfig) -> None:
        self._bus, self._keys, self._workers, self._clock = bus, keys, workers, clock
        self._reader = LazyReader(bus.reader(keys.kv(), keys.index()), clock)
        self._asked: dict[Incarnation, float] = {}  # worker -> when it was asked to resend
        self._looked = float("-inf")
        self._progress = clock.now()
        self._num_queries = self._num_resends = 0
        self.index = PrefixIndex(config.max_blocks)

    async def run(self, *, started: Callable[[], None] = lambda: None) -> None:
        """Serve for ever. Begins by asking every live worker for all that it holds."""
        deliveries: list[Delivery] = []
        joined = False
        while True:
            try:
                if not joined:
                    await self._ask_everybody()
                    joined = True
                    started()
                deliveries = deliveries or await self._reader.next(LOOK_EVERY_S)
                await self.take(deliveries)
                self._reader.ack(deliveries)
                deliveries = []
                await self._look_around()
                self._progress = self._clock.now()
            except BusError as exc:
                log.warning("index.paused", error=str(exc))
                await self._clock.sleep(LOOK_EVERY_S)

    async def take(self, deliveries: Sequence[Delivery]) -> None:
        """Apply events, then answer questions. Repeatable.

        :raises BusError: Redis is lost.
        """
        queries: dict[Incarnation, list[MatchQuery]] = {}
        for message in (m for delivery in deliveries for m in delivery.messages):
            match message:
                case KvEvents():
                    if not self.index.apply(message):
                        await self._ask_to_resend(message.incarnation)
                case WorkerGone(incarnation=incarnation):
                    self.index.forget(incarnation)
                    self._asked.pop(incarnation, None)
                case MatchQuery():
                    queries.setdefault(message.reply_to, []).append(message)
        for reply_to, asked in queries.items():
            self._num_queries += len(asked)
            await self._bus.publish(self._keys.reply(reply_to), *map(self._answer, asked))

    def stats(self) -> dict[str, float]:
        index = self.index.stats()
        return {
            **{name: getattr(index, name) for name in index.__slots__},
            "num_queries": self._num_queries,
            "num_resends": self._num_resends,
        }

    def health(self) -> tuple[bool, dict[str, object]]:
        idle_s = self._clock.now() - self._progress
        return idle_s < OVERDUE_S, {"seconds_since_progress": round(idle_s, 1)}

    def _answer(self, query: MatchQuery) -> MatchReply:
        runs = self.index.match(query.fingerprint, query.hashes)
        return MatchReply(query_id=query.query_id, num_blocks={str(i): length for i, length in runs.items()})

    async def _ask_everybody(self) -> None:
        for view in await self._workers.workers():
            if view.alive:
                self.index.expect(view.registration.incarnation, view.registration.fingerprint)
                await self._ask_to_resend(view.registration.incarnation)

    async def _ask_to_resend(self, incarnation: Incarnation) -> None:
        self._asked[incarnation] = self._clock.now()
        self._num_resends += 1
        log.info("index.resend", worker=incarnation)
        await self._bus.publish(self._keys.control(incarnation), ResendKv())

    async def _look_around(self) -> None:
        """Now and then: forget workers that the roster does not list, ask again where no answer came."""
        now = self._clock.now()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        known = set(self.index.incarnations())
        if not known:
            return
        listed = {view.registration.incarnation for view in await self._workers.workers()}
        for incarnation in known - listed:
            self.index.forget(incarnation)
            self._asked.pop(incarnation, None)
        for incarnation in self.index.unsure():
            if now - self._asked.get(incarnation, float("-inf")) >= RESEND_AFTER_S:
                await self._ask_to_resend(incarnation)


async def serve(process: Process) -> None:
    """The process's main: until SIGTERM."""
    bus = RedisBus(process.link, process.clock)
    roster = Roster(process.link, process.keys, process.settings.lease.heartbeat_s)
    service = IndexService(bus, process.keys, roster, process.clock, process.settings.index)
    ready = anyio.Event()
    metrics = Metrics("prefix_index")
    metrics.stats(service.stats, counters=COUNTERS)
    probes = Probes(health=excused(service.health, process.link), ready=lambda: (ready.is_set(), {}), metrics=metrics)
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_http, process.settings.index.host, process.settings.index.port, probes)
        log.info("service.listening", port=port)
        tasks.start_soon(partial(service.run, started=ready.set))
        await process.stopping.wait()
        tasks.cancel_scope.cancel()
