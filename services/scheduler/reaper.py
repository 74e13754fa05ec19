"""Finds what is lost: leases past their deadline, workers without a heartbeat, books that differ from Redis.

Nothing is reaped for one lease period after the start, after Redis could not be reached, after a look that took
suspiciously long, or after Redis' clock was set: in such a time nobody could renew anything. What a look has decided is
good for a heartbeat by Redis' clock: a script that an outage, or a process that stood still, holds up does nothing.
"""

from contextlib import suppress
from dataclasses import dataclass

import structlog

from services.scheduler.dispatcher import Dispatcher
from services.scheduler.ledger import Ledger
from services.scheduler.ports import LastOutage, Requests, Workers
from services.scheduler.wakeup import Wakeup
from shared.bus import Bus
from shared.clock import Clock
from shared.config import LeaseConfig, SchedulerConfig
from shared.errors import BusError, BusFull
from shared.ids import Incarnation, RequestId
from shared.keys import Keys
from shared.leases import FOREVER_MS
from shared.messages import WorkerGone

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReaperStats:
    num_buried: int
    num_requeued: int
    num_failed: int
    num_gateways_buried: int


class Reaper:
    """Owns the decision that somebody is dead."""

    def __init__(
        self,
        requests: Requests,
        workers: Workers,
        bus: Bus,
        keys: Keys,
        ledger: Ledger,
        dispatcher: Dispatcher,
        wakeup: Wakeup,
        clock: Clock,
        last_outage: LastOutage,
        config: SchedulerConfig,
        lease: LeaseConfig,
    ) -> None:
        self._requests, self._workers, self._bus, self._keys = requests, workers, bus, keys
        self._ledger, self._dispatcher, self._wakeup = ledger, dispatcher, wakeup
        self._clock, self._last_outage, self._config, self._lease = clock, last_outage, config, lease
        self._quiet_since = self.last_look = clock.now()
        self._reconciled = float("-inf")
        self._ahead: float | None = None  # Redis' clock before ours, s
        self._num_gateways_buried = 0
        self.stream_lengths: dict[str, int] = {}
        self._num_buried = self._num_requeued = self._num_failed = 0

    def stats(self) -> ReaperStats:
        return ReaperStats(self._num_buried, self._num_requeued, self._num_failed, self._num_gateways_buried)

    async def run(self) -> None:
        """Look every `reap_every_s`, for ever."""
        while True:
            slept_from = self._clock.now()
            await self._clock.sleep(self._config.reap_every_s)
            if self._clock.now() - slept_from > self._config.reap_every_s + self._lease.heartbeat_s:
                self._be_quiet("this process stood still")
            try:
                await self.look()
                self.last_look = self._clock.now()
            except BusError as exc:
                self._be_quiet(str(exc))

    async def look(self) -> None:
        """One round.

        :raises BusError: Redis is lost; whatever was not done is found again by the next round.
        """
        started = self._clock.now()
        if started - self._reconciled >= self._lease.heartbeat_s:
            await self._reconcile()
            self._reconciled = started
        dead = await self._workers.dead_workers()
        silent = await self._workers.dead_gateways()
        expired = await self._requests.expired()
        now_ms = await self._compare_clocks()  # behind them: who looks dead by a clock that was set just before is not
        if self._clock.now() - started > self._lease.heartbeat_s:
            self._be_quiet("redis was slow")
        if not self._may_reap():
            return
        until_ms = now_ms + int(self._lease.heartbeat_s * 1000)
        for incarnation in dead:
            await self._bury(incarnation, until_ms)
        for gateway in silent:
            await self._bury_gateway(gateway, until_ms)
        for request_id, epoch in expired:
            await self._requeue(request_id, epoch, "its lease ran out", until_ms=until_ms)

    async def _compare_clocks(self) -> int:
        """All deadlines are Redis' time: if that was set forward, the living look dead until they renew; if it was set
        back, the dead look alive until it is as late again. Redis' time, ms."""
        now_ms = await self._requests.redis_now_ms()
        ahead = now_ms / 1000 - self._clock.now()
        if self._ahead is None or ahead < self._ahead - self._lease.heartbeat_s:
            num_pulled_in = await self._workers.pull_in_deadlines(self._lease.lease_s)
            if num_pulled_in:
                log.warning("reaper.deadlines_pulled_in", count=num_pulled_in)
        if self._ahead is not None and abs(ahead - self._ahead) > self._lease.heartbeat_s:
            self._be_quiet(f"redis' clock moved by {ahead - self._ahead:.1f} s")
        self._ahead = ahead
        return now_ms

    async def _reconcile(self) -> None:
        for incarnation in self._ledger.incarnations():
            confirmed = self._ledger.num_confirmed
            self._ledger.reconcile(incarnation, await self._workers.held(incarnation), confirmed)
        await self._measure()

    async def _measure(self) -> None:
        """How much waits in the streams: what grows without end when a consumer is stuck."""
        keys, workers = self._keys, self._ledger.incarnations()
        shared = {"sched": keys.sched(), "kv": keys.kv(), "index": keys.index()}
        lengths = await self._workers.stream_lengths(*shared.values(), *map(keys.work, workers))
        self.stream_lengths = dict(zip(shared, lengths, strict=False))
        self.stream_lengths["work"] = sum(lengths[len(shared) :])

    def _may_reap(self) -> bool:
        outage = self._last_outage()
        if outage is not None and outage > self._quiet_since:
            self._quiet_since = outage
        return self._clock.now() - self._quiet_since >= self._lease.lease_s

    def _be_quiet(self, why: str) -> None:
        log.warning("reaper.quiet", for_s=self._lease.lease_s, why=why)
        self._quiet_since = self._clock.now()

    async def _bury(self, incarnation: Incarnation, until_ms: int) -> None:
        """Fence a dead worker, send what it held round again, tell the index. `forget` is last: a reaper that ends
        before it finds the worker again."""
        held = await self._workers.bury(incarnation, until_ms)
        if held is None:
            return  # it came back just now, or this comes too late
        log.warning("worker.dead", worker=incarnation, held=len(held))
        self._ledger.bury(incarnation)
        for request_id, epoch in held:
            await self._requeue(request_id, epoch, "its worker died", lost=incarnation)
        with suppress(BusFull):  # the index looks at the list of workers itself now and then
            await self._bus.publish(self._keys.kv(), WorkerGone(incarnation=incarnation))
        await self._workers.forget(incarnation)
        self._num_buried += 1
        self._dispatcher.refresh_wanted = True
        self._wakeup.ring()

    async def _bury_gateway(self, gateway: Incarnation, until_ms: int) -> None:
        """Nobody reads its answers any more: its requests are cancelled, its stream is deleted."""
        opened = await self._workers.bury_gateway(gateway, until_ms)
        if opened is None:
            return
        log.warning("gateway.dead", gateway=gateway, open=len(opened))
        for request_id in opened:
            await self._requests.cancel(request_id, "its gateway died")
        await self._workers.forget_gateway(gateway)
        self._num_gateways_buried += 1

    async def _requeue(
        self, request_id: RequestId, epoch: int, reason: str, lost: str = "", until_ms: int = FOREVER_MS
    ) -> None:
        """The `sched` stream tells the rest: a requeued request comes in as `Admitted`, a failed one as `Ended`."""
        answer = await self._requests.requeue(request_id, epoch, reason, self._config.max_attempts, lost, until_ms)
        if answer == "stale":
            return
        log.warning("request.lost", request_id=request_id, epoch=epoch, reason=reason, answer=answer)
        if answer == "requeued":
            self._num_requeued += 1
        else:
            self._num_failed += 1
