"""Acks that are put off, and never lost."""

import pytest

from shared.bus_memory import MemoryBus
from shared.clock import ManualClock
from shared.ids import RequestId
from shared.keys import Keys
from shared.lazy_reader import ACK_AFTER_S, MAX_HELD, LazyReader
from shared.messages import Ended

pytestmark = pytest.mark.anyio
ENDED = Ended(request_id=RequestId("a"))


async def test_entries_are_deleted_a_little_later() -> None:
    """Not at the ack, but at the first read after `ACK_AFTER_S`; what was not acked stays."""
    clock, sched = ManualClock(), Keys("t").sched()
    bus = MemoryBus(clock)
    reader = LazyReader(bus.reader(sched), clock)
    await bus.publish(sched, ENDED)
    reader.ack(await reader.next(0))
    await bus.publish(sched, ENDED)
    assert len(await reader.next(0)) == 1
    assert bus.depth(sched) == 2
    clock.advance(ACK_AFTER_S)
    assert await reader.next(0) == []
    assert bus.depth(sched) == 1


async def test_many_entries_are_deleted_at_once() -> None:
    """A busy stream does not grow without bound while its consumer keeps up."""
    clock, sched = ManualClock(), Keys("t").sched()
    bus = MemoryBus(clock)
    reader = LazyReader(bus.reader(sched), clock)
    for _ in range(MAX_HELD):
        await bus.publish(sched, ENDED)
    reader.ack(await reader.next(0))
    await reader.next(0)
    assert bus.depth(sched) == 0
