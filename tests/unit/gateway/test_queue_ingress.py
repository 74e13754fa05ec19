"""A gateway's share of the queue: how much it takes, what it keeps, and what it hands over."""

from collections.abc import AsyncIterator

import anyio
import pytest

from shared.clock import SystemClock
from shared.config import RedisConfig
from shared.messages import Finished
from shared.redis_link import RedisLink
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import answer
from tests.unit.gateway.queue_world import COMPLETION, CONFIG, KEYS, Queue, make_queue, other_gateway

pytestmark = pytest.mark.anyio


@pytest.fixture
async def queue(gateway: Gateway, redis_url: str) -> AsyncIterator[Queue]:
    link = RedisLink(RedisConfig(url=redis_url), SystemClock())
    yield make_queue(gateway, link)
    await link.close()


async def test_a_gateway_reads_no_more_than_it_has_room_for(queue: Queue) -> None:
    """The rest waits in the stream, for any gateway."""
    async with queue.running():
        for i in range(5):
            await queue.submit(f"job-{i}", COMPLETION)
        await queue.until(lambda: len(queue.gateway.port.admitted) == 3)
        await anyio.wait_all_tasks_blocked()
        pending = await queue.link.client.xpending(KEYS.submit(), "gateways")
        assert (pending["pending"], queue.ingress.counts().open) == (3, 3)
        queue.gateway.port.script = answer([5])
        for request in list(queue.gateway.port.admitted):
            queue.gateway.port.emit(Finished(request.request_id, 1, "stop", 0))
        for i in range(5):
            await queue.result(f"job-{i}")


async def test_a_gateway_that_ends_hands_its_submissions_over_at_once(queue: Queue) -> None:
    """And cancels none of their work."""
    async with queue.running():
        await queue.submit("a", COMPLETION)
        await queue.until(lambda: queue.gateway.port.admitted)
    other = other_gateway(queue.link)
    (s,) = await other.claim(CONFIG.submission_lease_s, 10)
    assert s.id == "a"
    assert queue.gateway.port.cancelled == []


async def test_a_gateway_that_lost_a_submission_drops_it_and_cancels_nothing(queue: Queue) -> None:
    """It learns so at its next renewal."""
    other = other_gateway(queue.link)
    async with queue.running():
        await queue.submit("a", COMPLETION)
        await queue.until(lambda: queue.gateway.port.admitted)
        (s,) = await queue.until_redis(lambda: other.claim(0.0, 10))
        await other.open(s)
        await queue.until(lambda: queue.ingress.counts().open == 0)
        assert len(queue.gateway.app.state.streams) == 0
    assert queue.gateway.port.cancelled == []
