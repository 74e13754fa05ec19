"""A connection that breaks in the middle of a pipeline: the call is made again, whole."""

from typing import Any

import anyio
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.clock import ManualClock, SystemClock
from shared.config import RedisConfig
from shared.ids import Incarnation, RequestId
from shared.keys import Keys
from shared.leases import Leases
from shared.randomness import SeededRandomness
from shared.redis_link import RedisLink
from shared.roster import Roster
from tests.unit.shared.cell import GW, registration, request

pytestmark = pytest.mark.anyio
KEYS = Keys("outage")


class Breaking:
    """A client whose first pipeline loses its connection before the answer."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.num_pipelines = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pipeline(self, transaction: bool) -> Any:
        pipe = self._client.pipeline(transaction=transaction)
        self.num_pipelines += 1
        if self.num_pipelines == 1:
            run = pipe.execute

            async def execute() -> Any:
                await run()
                raise RedisConnectionError("cut")

            pipe.execute = execute
        return pipe


async def test_a_broken_pipeline_is_sent_again_whole(redis_url: str) -> None:
    """Workers and waiting requests are all there although the first answer was lost."""
    link = RedisLink(RedisConfig(url=redis_url), SystemClock())
    roster, leases = Roster(link, KEYS, 1.0), Leases(link, KEYS, SeededRandomness(1))
    await roster.register(registration(Incarnation("d"), "decode"))
    await roster.greet(GW)
    assert await leases.admit(request(RequestId("r")), 10) == "admitted"
    real = link.client
    link.client = first = Breaking(real)
    assert [view.registration.incarnation for view in await roster.workers()] == ["d"]
    link.client = second = Breaking(real)
    assert [admitted.request_id for admitted in await leases.queued()] == ["r"]
    assert (first.num_pipelines, second.num_pipelines) == (3, 2)  # `workers` takes two, of which the first broke
    await link.close()


@pytest.mark.parametrize("how", ["read-only", "no disk"])
async def test_a_redis_that_cannot_write_is_away(redis_url: str, how: str) -> None:
    """A replica since a moment ago, or one whose disk is full: what is said to it waits, in a script and outside."""
    link = RedisLink(RedisConfig(url=redis_url, retry_s=30.0), SystemClock())
    roster, admin = Roster(link, KEYS, 1.0), RedisLink(RedisConfig(url=redis_url), SystemClock()).client
    if how == "read-only":
        await admin.replicaof("127.0.0.1", 1)
    else:
        await admin.config_set("min-replicas-to-write", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(roster.register, registration(Incarnation("d"), "decode"))
        while not link.is_down:
            await anyio.lowlevel.checkpoint()
        await (admin.replicaof("NO", "ONE") if how == "read-only" else admin.config_set("min-replicas-to-write", 0))
    assert not link.is_down
    assert await roster.heartbeat(Incarnation("d"))
    await admin.aclose()
    await link.close()


async def test_an_outage_lasts_until_an_answer(redis_url: str) -> None:
    """Also for a process that stood still at its end: it could not see that Redis was away, but nobody else could speak
    either."""
    clock = ManualClock()
    link = RedisLink(RedisConfig(url=redis_url), clock)
    failures = 2

    async def ping() -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RedisConnectionError("refused")
        return await link.client.ping()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.call, ping)
        await anyio.wait_all_tasks_blocked()
        clock.advance(0.1)
        await anyio.wait_all_tasks_blocked()
        assert link.last_outage == 0.1
        clock.advance(5.0)  # as if it had stood still while it waited
    assert link.last_outage == pytest.approx(5.1)
    await link.call(link.client.ping)
    assert link.last_outage == pytest.approx(5.1), "a call that went well at once says nothing of an outage"
    await link.close()
