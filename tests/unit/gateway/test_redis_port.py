"""The gateway's own stream: what it has taken in is deleted, many entries at once."""

from typing import Any, cast

import pytest

from services.gateway.redis_port import RedisRequestPort
from shared.bus_memory import MemoryBus
from shared.clock import ManualClock
from shared.ids import Incarnation, RequestId
from shared.keys import Keys
from shared.lazy_reader import ACK_AFTER_S
from shared.messages import EpochRaised

pytestmark = pytest.mark.anyio
ME = Incarnation("gateway-1")


async def test_a_steps_tokens_cost_no_deletion_of_their_own():
    """Entries that were given out stay for a while, and are then deleted together; the last ones stay for a restart."""
    clock, keys = ManualClock(), Keys("t")
    bus, channel = MemoryBus(clock), keys.tokens(ME)
    nobody = cast(Any, None)  # leases and roster have no part in this
    port = RedisRequestPort(ME, nobody, nobody, bus, keys, clock, 1)
    events = [EpochRaised(RequestId("a"), epoch, 0) for epoch in range(1, 5)]
    for event in events[:3]:
        await bus.publish(channel, event)
        assert await port.next_events() == [event]
    assert bus.depth(channel) == 3
    clock.advance(ACK_AFTER_S)
    await bus.publish(channel, events[3])
    assert await port.next_events() == [events[3]]
    assert bus.depth(channel) == 1
