"""A Redis at its memory limit refuses what is new, and carries what was begun to its end."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shared.clock import SystemClock
from shared.errors import BusFull
from shared.ids import Incarnation, RequestId
from shared.leases import FOREVER_MS
from shared.messages import CreditFreed, EpochRaised, Finished, Tokens, WorkerGone
from shared.randomness import SeededRandomness
from shared.submissions import End, ResultItem, Submissions
from tests.unit.shared.cell import A1, A2, GW, Cell, D, P, R, dispatched, placement, registration, request

pytestmark = pytest.mark.anyio
R2 = RequestId("cmpl-2")


class Memory:
    def __init__(self, cell: Cell) -> None:
        self._client = cell.link.client

    async def fill(self) -> None:
        """From now on there is none for what is new."""
        await self._client.config_set("maxmemory", 1)

    async def free(self) -> None:
        await self._client.config_set("maxmemory", 0)


@pytest.fixture
async def memory(cell: Cell) -> AsyncIterator[Memory]:
    memory = Memory(cell)
    yield memory
    await memory.free()


async def test_a_full_redis_takes_no_new_request(cell: Cell, memory: Memory) -> None:
    """Neither from HTTP nor from its queue, and nothing of it stays; with memory again, both go in."""
    await cell.roster.greet(GW)
    submissions = Submissions(cell.link, cell.keys, SystemClock(), SeededRandomness(1), GW, 60.0)
    await cell.link.client.xadd(cell.keys.submit(), {"id": "job", "request": "{}"})
    (submission,) = await submissions.read(1, 1.0)
    await memory.fill()
    with pytest.raises(BusFull):
        await cell.leases.admit(request(), 8)
    with pytest.raises(BusFull):
        await submissions.open(submission)
    assert await cell.leases.load(R) is None
    assert await cell.leases.queued() == []
    await memory.free()
    assert await cell.leases.admit(request(), 8) == "admitted"
    assert await submissions.open(submission) is not None


async def test_a_request_goes_its_whole_way_through_a_full_redis(cell: Cell, memory: Memory) -> None:
    """Dispatched, accepted, renewed, said, lost, dispatched again, and completed; the credit comes back."""
    fence = await dispatched(cell)
    await cell.leases.admit(request(R2), 8)
    await memory.fill()
    assert await cell.leases.accept(fence, P, "prefill", 5) == "held"
    assert await cell.leases.emit(GW, [(Tokens(R, 1, 0, 0, (11,)), A1)]) == [True]
    assert await cell.leases.renew(P, [fence], 5) == ["held"]
    assert await cell.leases.accept(fence, D, "decode", 5, prefill=P) == "held"
    assert await cell.leases.refund(D, R, 1, keep=3) == 1
    assert await cell.leases.requeue(R, 1, "lost", 3, lost=D) == "requeued"
    assert await cell.leases.refund(D, R, 1) == 3
    assert await cell.leases.lead(Incarnation("s2")) == 2
    assert await cell.leases.dispatch(placement(epoch=2, attempt=A2, term=2)) == "dispatched"
    again = replace(fence, epoch=2, attempt=A2)
    assert await cell.leases.accept(again, D, "decode", 5, prefill=P) == "held"
    assert await cell.leases.emit(GW, [(Tokens(R, 2, 0, 1, (12,)), A2)]) == [True]
    finished = Finished(R, 2, "length", 2)
    assert await cell.leases.complete(again, GW, finished, D, P)
    assert await cell.leases.dispatch(placement(request_id=R2, term=2)) == "dispatched"
    assert await cell.leases.cancel(R2, "client gone")
    assert await cell.seen(cell.keys.tokens(GW)) == [
        Tokens(R, 1, 0, 0, (11,)),
        EpochRaised(R, 2, 1),
        Tokens(R, 2, 0, 1, (12,)),
        finished,
        Finished(R2, 1, "cancelled", error="client gone"),
    ]
    assert CreditFreed(incarnation=D) in await cell.seen(cell.keys.sched())
    assert await cell.taken() == 4, "of the cancelled one, until decode has dropped it"


async def test_the_living_stay_known_and_the_dead_are_buried_in_a_full_redis(cell: Cell, memory: Memory) -> None:
    """Heartbeats, greetings, drains and burials need no new memory; a worker that was restarted joins."""
    await dispatched(cell)
    key = await cell.leases.deployment_key()
    silent = Incarnation("gw2")
    await cell.link.client.zadd(cell.keys.gateways(), {silent: 1})
    await memory.fill()
    assert await cell.leases.deployment_key() == key
    assert not await cell.roster.greet(GW)
    assert await cell.roster.heartbeat(D)
    await cell.roster.register(registration(Incarnation("d2"), "decode"))
    assert await cell.roster.heartbeat(Incarnation("d2"))
    assert await cell.roster.retire(D, "draining")
    assert await cell.roster.retire(P, "dead")
    assert await cell.roster.bury(P, FOREVER_MS) == [(R, 1)]
    assert await cell.leases.requeue(R, 1, "its worker died", 3, lost=P) == "requeued"
    await cell.roster.forget(P)
    assert {v.registration.incarnation for v in await cell.roster.workers()} == {D, "d2"}
    assert await cell.roster.bury_gateway(silent, FOREVER_MS) == []
    assert await cell.roster.bury_gateway(GW, FOREVER_MS) is None


async def test_an_open_submission_ends_in_a_full_redis(cell: Cell, memory: Memory) -> None:
    """Its tokens, its end, its dead letter; it can be adopted, too."""
    await dispatched(cell)
    await cell.link.client.xadd(cell.keys.submit(), {"id": "job", "request": "{}"})
    submissions = Submissions(cell.link, cell.keys, SystemClock(), SeededRandomness(1), GW, 60.0)
    (submission,) = await submissions.read(1, 1.0)
    await submissions.open(submission)
    await memory.fill()
    assert await submissions.adopt(submission, request()) == "adopted"
    assert await submissions.renew([submission]) == [True]
    assert await submissions.write(submission, [ResultItem(0, 0, (7,), "a", 1)]) == "out"
    assert await submissions.end(submission, End(500, "error", b"{}", dead="why"))
    assert await cell.link.client.xlen(cell.keys.dead()) == 1
    assert await cell.link.client.xlen(cell.keys.submit()) == 0


async def test_a_message_to_a_full_redis_is_refused_by_name(cell: Cell, memory: Memory) -> None:
    """Not only from inside a script."""
    await memory.fill()
    with pytest.raises(BusFull):
        await cell.bus.publish(cell.keys.kv(), WorkerGone(incarnation=D))
