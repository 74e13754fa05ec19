"""One suite for both buses: what the in-memory fake promises, Redis keeps."""

from collections.abc import AsyncIterator

import anyio
import pytest

from shared.bus import LOOK_AGAIN_S, Bus, RedisBus, RedisReader
from shared.bus_memory import MemoryBus
from shared.clock import SystemClock
from shared.config import RedisConfig
from shared.errors import BusError
from shared.ids import Incarnation
from shared.keys import Keys
from shared.messages import Admitted, Cancel, Ended, RequestId, ResendKv, encode
from shared.redis_link import RedisLink

pytestmark = pytest.mark.anyio
KEYS = Keys("bus-test")
ME = Incarnation("w1")


@pytest.fixture(params=["memory", "redis"])
async def bus(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Bus]:
    clock = SystemClock()
    if request.param == "memory":
        yield MemoryBus(clock)
        return
    link = RedisLink(RedisConfig(url=redis_url), clock)
    yield RedisBus(link, clock)
    await link.close()


def admitted(n: int) -> Admitted:
    return Admitted(request_id=RequestId(str(n)), epoch=1)


def flat(deliveries) -> list:
    return [message for delivery in deliveries for message in delivery.messages]


async def test_a_reader_gets_every_entry_once_and_in_order(bus: Bus) -> None:
    """Several messages of one entry stay together."""
    await bus.publish(KEYS.sched(), admitted(1), Ended(request_id=RequestId("0")))
    await bus.publish(KEYS.sched(), admitted(2))
    reader = bus.reader(KEYS.sched())
    deliveries = await reader.next(1)
    assert [len(d.messages) for d in deliveries] == [2, 1]
    assert flat(deliveries) == [admitted(1), Ended(request_id=RequestId("0")), admitted(2)]
    assert await reader.next(0.01) == []


async def test_what_was_not_acked_is_found_again_by_the_next_reader(bus: Bus) -> None:
    """The consumer deletes what it has processed, and nobody else does."""
    for n in range(3):
        await bus.publish(KEYS.sched(), admitted(n))
    first = bus.reader(KEYS.sched())
    deliveries = await first.next(1)
    await first.ack(deliveries[:2])
    assert flat(await bus.reader(KEYS.sched()).next(1)) == [admitted(2)]


async def test_control_comes_before_work(bus: Bus) -> None:
    """A reader of two channels gives the first one's entries first, whenever they came."""
    work, control = KEYS.sched(), KEYS.control(ME)
    await bus.publish(work, admitted(1))
    await bus.publish(control, Cancel(request_id=RequestId("1"), epoch=1))
    got = flat(await bus.reader(control, work).next(1))
    assert [type(m) for m in got] == [Cancel, Admitted]


async def test_a_blocked_reader_wakes_for_a_new_entry(bus: Bus) -> None:
    """Blocking consume."""
    reader = bus.reader(KEYS.control(ME))
    got = []

    async def consume() -> None:
        got.extend(flat(await reader.next()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        await bus.publish(KEYS.control(ME), ResendKv())
    assert got == [ResendKv()]


async def test_a_group_gives_each_entry_to_one_consumer_and_reclaims_the_dead_ones(bus: Bus) -> None:
    """An entry that a consumer got and never acked goes to another after the idle time."""
    for n in range(4):
        await bus.publish(KEYS.sched(), admitted(n))
    dying, living = bus.group(KEYS.sched(), "g", "dying"), bus.group(KEYS.sched(), "g", "living")
    lost = await dying.next(1)
    assert len(lost) == 4
    await dying.ack(lost[:1])
    assert await living.next(0.01) == []
    taken = await living.reclaim(0.0)
    assert flat(taken) == [admitted(1), admitted(2), admitted(3)]
    await living.ack(taken)
    assert await living.reclaim(0.0) == []
    assert await bus.reader(KEYS.sched()).next(0.01) == []


async def test_reclaim_leaves_fresh_entries_alone(bus: Bus) -> None:
    """A slow consumer is not robbed before its time."""
    await bus.publish(KEYS.sched(), admitted(1))
    slow, other = bus.group(KEYS.sched(), "g", "slow"), bus.group(KEYS.sched(), "g", "other")
    await slow.next(1)
    assert await other.reclaim(60.0) == []


async def test_an_undecodable_entry_is_given_empty_so_that_it_can_be_acked(redis_url: str) -> None:
    """Garbage never blocks a stream."""
    link = RedisLink(RedisConfig(url=redis_url), SystemClock())
    bus = RedisBus(link, SystemClock())
    await link.client.xadd(KEYS.sched().key, {"m": b"\xc1garbage"})
    await bus.publish(KEYS.sched(), admitted(1))
    reader = bus.reader(KEYS.sched())
    deliveries = await reader.next(1)
    assert [d.messages for d in deliveries] == [(), (admitted(1),)]
    await reader.ack(deliveries)
    assert await bus.reader(KEYS.sched()).next(0.01) == []
    await link.close()


class HandClock(SystemClock):
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 5.0

    def now(self) -> float:
        return self.at


async def read_a_stream_and_lose_it(redis_url: str) -> tuple[RedisLink, HandClock, RedisReader]:
    """A reader that has read an entry of today, of a stream that is another one now, from 1970."""
    clock = HandClock()
    link = RedisLink(RedisConfig(url=redis_url), clock)
    bus = RedisBus(link, clock)
    reader = bus.reader(KEYS.sched())
    await bus.publish(KEYS.sched(), admitted(1))
    await reader.ack(await reader.next(5.0))
    await link.client.delete(KEYS.sched().key)
    await link.client.execute_command("XADD", KEYS.sched().key, "1-1", "m", encode(admitted(2)))
    assert await reader.next(0.0) == []
    return link, clock, reader


async def test_a_redis_that_lost_all_and_is_behind_in_time_is_read_all_the_same(redis_url: str) -> None:
    """Its entries have ids before those that the reader has seen."""
    link, _, reader = await read_a_stream_and_lose_it(redis_url)
    link.outages += 1  # as the link counts when its connection breaks
    assert flat(await reader.next(5.0)) == [admitted(2)]
    await link.close()


async def test_a_stream_that_is_another_one_is_found_without_an_outage(redis_url: str) -> None:
    """A gateway that was suspended meanwhile sees none; an entry that comes at the new one's end hides nothing."""
    link, clock, reader = await read_a_stream_and_lose_it(redis_url)
    await link.client.execute_command("XADD", KEYS.sched().key, "*", "m", encode(admitted(3)))
    assert flat(await reader.next(5.0)) == [admitted(3)]
    clock.at += LOOK_AGAIN_S
    assert flat(await reader.next(5.0)) == [admitted(2)]
    clock.at += LOOK_AGAIN_S
    assert await reader.next(0.0) == []
    await link.close()


async def test_a_lost_redis_is_a_typed_error_after_the_retry_limit() -> None:
    """Nothing listens there."""
    link = RedisLink(RedisConfig(url="redis://127.0.0.1:1/0", retry_s=0.05), SystemClock())
    with pytest.raises(BusError, match="does not answer"):
        await RedisBus(link, SystemClock()).publish(KEYS.sched(), admitted(1))
    assert link.outages > 1
    await link.close()
