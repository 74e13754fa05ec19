"""Fixtures of the shared room's tests."""

from collections.abc import AsyncIterator

import pytest

from shared.bus import RedisBus
from shared.clock import SystemClock
from shared.config import RedisConfig
from shared.keys import Keys
from shared.leases import Leases
from shared.randomness import SeededRandomness
from shared.redis_link import RedisLink
from shared.roster import Roster
from tests.unit.shared.cell import GW, Cell


@pytest.fixture
async def cell(redis_url: str) -> AsyncIterator[Cell]:
    clock = SystemClock()
    link = RedisLink(RedisConfig(url=redis_url), clock)
    keys = Keys("test")
    roster = Roster(link, keys, 1.0)
    assert await roster.greet(GW)
    yield Cell(Leases(link, keys, SeededRandomness(1)), roster, RedisBus(link, clock), keys, link)
    await link.close()
