"""Scheduler and index over a real Redis, with workers and a gateway played by the test."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.abc
import pytest

from services.prefix_index.service import IndexService
from services.scheduler.ports import Deposed
from services.scheduler.service import Scheduler
from shared.bus import RedisBus
from shared.capability import verify
from shared.clock import SystemClock
from shared.config import LeaseConfig, PrefixIndexConfig, RedisConfig, SchedulerConfig
from shared.ids import Incarnation, RequestId
from shared.keys import Channel, Keys
from shared.leases import Fence, Leases
from shared.messages import Cleared, DecodeTask, EpochRaised, Finished, KvEvents, PrefillTask, Stored
from shared.randomness import SeededRandomness
from shared.redis_link import RedisLink
from shared.roster import Roster
from tests.unit.scheduler.cell import GATEWAY, registration_of, request_of

pytestmark = pytest.mark.anyio
LEASE = LeaseConfig(lease_s=0.5, heartbeat_s=0.1)


@dataclass
class Live:
    """One cell on Redis; `alive` are the workers whose heartbeats the test sends."""

    link: RedisLink
    keys: Keys
    leases: Leases
    roster: Roster
    bus: RedisBus
    clock: SystemClock
    alive: set[Incarnation]
    tasks: anyio.abc.TaskGroup

    def scheduler(self, name: str = "scheduler-0", index_timeout_s: float = 2.0) -> Scheduler:
        return Scheduler(
            self.bus,
            self.keys,
            self.leases,
            self.roster,
            Incarnation(name),
            self.clock,
            SeededRandomness(7),
            lambda: self.link.last_outage,
            SchedulerConfig(index_timeout_s=index_timeout_s, reap_every_s=0.05),
            LEASE,
        )

    async def join(self, name: str, num_blocks: int = 100) -> Incarnation:
        registration = registration_of(name, "prefill" if name[0] == "p" else "decode", num_blocks)
        await self.roster.register(registration)
        self.alive.add(registration.incarnation)
        return registration.incarnation

    async def heartbeats(self) -> None:
        while True:
            await self.roster.greet(GATEWAY)
            for incarnation in list(self.alive):
                await self.roster.heartbeat(incarnation)
            await anyio.sleep(0.03)

    async def one(self, channel: Channel) -> object:
        """The next message of a channel."""
        reader = self.bus.reader(channel)
        deliveries = await reader.next(5.0)
        assert deliveries, f"nothing came on {channel.key}"
        await reader.ack(deliveries[:1])
        return deliveries[0].messages[0]


async def until(check: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not check():  # noqa: ASYNC110
            await anyio.sleep(0.005)


@asynccontextmanager
async def a_cell(redis_url: str) -> AsyncIterator[Live]:
    clock = SystemClock()
    link = RedisLink(RedisConfig(url=redis_url), clock)
    keys = Keys("t")
    async with anyio.create_task_group() as tasks:
        live = Live(
            link,
            keys,
            Leases(link, keys, SeededRandomness(1)),
            Roster(link, keys, LEASE.heartbeat_s),
            RedisBus(link, clock),
            clock,
            set(),
            tasks,
        )
        await live.roster.greet(GATEWAY)
        tasks.start_soon(live.heartbeats)
        yield live
        tasks.cancel_scope.cancel()
    await link.close()


async def test_admitted_to_ended(redis_url: str) -> None:
    """Tasks reach both workers with a capability that holds, and the end frees the books."""
    async with a_cell(redis_url) as live:
        p, d = await live.join("p0"), await live.join("d0")
        scheduler = live.scheduler()
        live.tasks.start_soon(scheduler.run)
        live.tasks.start_soon(IndexService(live.bus, live.keys, live.roster, live.clock, PrefixIndexConfig()).run)
        assert await live.leases.admit(request_of("a"), 10) == "admitted"
        prefill_task = await live.one(live.keys.work(p))
        task = await live.one(live.keys.work(d))
        assert isinstance(prefill_task, PrefillTask)
        assert isinstance(task, DecodeTask)
        assert task.source
        key = await live.leases.deployment_key()
        assert verify(task.source.capability, key, RequestId("a"), 1, task.attempt, p, d)
        assert scheduler.stats().num_hints_unanswered == 0
        finished = Finished(RequestId("a"), 1, "stop")
        assert await live.leases.complete(Fence(RequestId("a"), 1, task.attempt), GATEWAY, finished, d, p)
        await until(lambda: scheduler.stats().num_in_flight == 0)


async def test_what_the_index_knows_reaches_placement(redis_url: str) -> None:
    """A decode worker that says it holds the prompt gets it, without a handoff."""
    async with a_cell(redis_url) as live:
        await live.join("p0")
        await live.join("d0")
        d1 = await live.join("d1")
        index = IndexService(live.bus, live.keys, live.roster, live.clock, PrefixIndexConfig())
        request = request_of("a", num_tokens=64)
        events = (Cleared(), Stored(hashes=request.block_hashes))
        live.tasks.start_soon(index.run)
        await live.one(live.keys.control(d1))
        await live.bus.publish(live.keys.kv(), KvEvents(incarnation=d1, fingerprint="f", seq=1, events=events))
        live.tasks.start_soon(live.scheduler().run)
        assert await live.leases.admit(request, 10) == "admitted"
        task = await live.one(live.keys.work(d1))
        assert isinstance(task, DecodeTask)
        assert task.source is None


async def test_a_worker_that_falls_silent_loses_its_requests(redis_url: str) -> None:
    """Another one gets them at the next epoch, the gateway is told, and the dead one is gone."""
    async with a_cell(redis_url) as live:
        d0 = await live.join("d0")
        scheduler = live.scheduler(index_timeout_s=0.01)
        live.tasks.start_soon(scheduler.run)
        await live.leases.admit(request_of("a"), 10)
        first = await live.one(live.keys.work(d0))
        assert isinstance(first, DecodeTask)
        d1 = await live.join("d1")
        live.alive.discard(d0)
        second = await live.one(live.keys.work(d1))
        assert isinstance(second, DecodeTask)
        assert (first.epoch, second.epoch) == (1, 2)
        assert first.attempt != second.attempt
        assert await live.one(live.keys.tokens(GATEWAY)) == EpochRaised(RequestId("a"), 2, 0)
        await until(lambda: scheduler.stats().num_buried == 1)
        assert [v.registration.incarnation for v in await live.roster.workers()] == [d1]


async def test_a_second_scheduler_ends_the_first(redis_url: str) -> None:
    """The older one finds out at its next dispatch and raises; no request is lost by it."""
    async with a_cell(redis_url) as live:
        d0 = await live.join("d0")
        first = live.scheduler("scheduler-a", index_timeout_s=0.01)
        await first._take_over()
        assert await live.leases.lead(Incarnation("scheduler-b")) == 2
        await live.leases.admit(request_of("a"), 10)
        await first.intake.resync()
        with pytest.raises(Deposed):
            await first.dispatcher.pump()
        live.tasks.start_soon(live.scheduler("scheduler-c", index_timeout_s=0.01).run)
        task = await live.one(live.keys.work(d0))
        assert isinstance(task, DecodeTask)
        assert task.term == 3
