"""Gateways in Redis: who lives may admit; what a dead one leaves; what Redis lost."""

import msgspec
import pytest

from shared.ids import Incarnation, RequestId
from shared.leases import FOREVER_MS
from shared.messages import (
    Finished,
    GenerateRequest,
    Tokens,
)
from tests.unit.shared.cell import A1, GW, Cell, D, P, R, dispatched, placement, request

pytestmark = pytest.mark.anyio


async def test_only_a_gateway_that_lives_can_admit(cell: Cell) -> None:
    """One that never greeted, or is being buried, is told so; greeting again helps."""
    stranger = replace_gateway(request(), Incarnation("gw2"))
    assert await cell.leases.admit(stranger, 8) == "unknown"
    assert await cell.roster.greet(Incarnation("gw2"))
    assert not await cell.roster.greet(Incarnation("gw2"))
    assert await cell.leases.admit(stranger, 8) == "admitted"


def replace_gateway(original: GenerateRequest, gateway: Incarnation) -> GenerateRequest:
    return msgspec.structs.replace(original, gateway=gateway)


async def test_a_dead_gateway_leaves_nothing_behind(cell: Cell) -> None:
    """Overdue: its open requests are listed for the reaper, and its stream goes once they have ended."""
    await dispatched(cell)
    await cell.leases.admit(request(RequestId("cmpl-2")), 8)
    assert await cell.roster.bury_gateway(GW, FOREVER_MS) is None, "it is not overdue"
    await cell.link.client.zadd(cell.keys.gateways(), {GW: 1})
    assert await cell.roster.dead_gateways() == [GW]
    assert sorted(await cell.roster.bury_gateway(GW, FOREVER_MS) or []) == ["cmpl-1", "cmpl-2"]
    assert await cell.leases.admit(request(RequestId("cmpl-3")), 8) == "unknown"
    assert await cell.leases.cancel(R, "its gateway died")
    await cell.roster.forget_gateway(GW)
    assert await cell.roster.dead_gateways() == [GW], "it has a request open still"
    assert await cell.leases.cancel(RequestId("cmpl-2"), "its gateway died")
    await cell.roster.forget_gateway(GW)
    assert await cell.roster.dead_gateways() == []
    assert not await cell.link.client.exists(cell.keys.tokens(GW).key, cell.keys.open(GW))


async def test_a_gateway_that_comes_back_keeps_its_stream(cell: Cell) -> None:
    """It greeted between burial and oblivion: whoever buries it must not delete what it reads from."""
    await dispatched(cell)
    await cell.link.client.zadd(cell.keys.gateways(), {GW: 1})
    assert await cell.roster.bury_gateway(GW, FOREVER_MS) == [R]
    assert await cell.leases.cancel(R, "its gateway died")
    assert await cell.roster.greet(GW), "it learns that it was given up"
    await cell.roster.forget_gateway(GW)
    assert await cell.seen(cell.keys.tokens(GW)) == [Finished(R, 1, "cancelled", error="its gateway died")]


async def test_a_request_that_redis_lost_goes_on_where_its_client_is(cell: Cell) -> None:
    """Admitted again with the tokens already sent, at an epoch that fences whoever worked on it before."""
    fence = await dispatched(cell)
    await cell.leases.emit(GW, [(Tokens(R, 1, 0, 0, (11, 12)), A1)])
    await cell.link.client.flushdb()
    assert await cell.leases.states([R]) == ["lost"]
    assert await cell.roster.greet(GW), "it learns that Redis forgot it"
    assert await cell.leases.readmit(request(), 2, (11, 12)) == "admitted"
    assert await cell.leases.readmit(request(), 2, (11, 12)) == "duplicate"
    assert await cell.leases.states([R, RequestId("never")]) == ["live", "lost"]
    state = await cell.leases.load(R)
    assert state is not None
    assert (state.epoch, state.output) == (2, (11, 12))
    assert await cell.leases.emit(GW, [(Tokens(R, 1, 0, 2, (13,)), A1)]) == [False]
    assert await cell.leases.accept(fence, D, "decode", 5) == "stale"


async def test_every_end_takes_a_request_off_its_gateways_list(cell: Cell) -> None:
    """Completed, cancelled, failed, given up after its attempts: none stays open."""
    fence = await dispatched(cell)
    await cell.leases.complete(fence, GW, Finished(R, 1, "length"), D, P)
    ends = {"cancelled": cell.leases.cancel, "failed": lambda i, why: cell.leases.fail(i, 1, why)}
    for name, end in ends.items():
        await cell.leases.admit(request(RequestId(name)), 8)
        assert await cell.link.client.sismember(cell.keys.open(GW), name)
        assert await end(RequestId(name), "why")
    last = RequestId("last")
    await cell.leases.admit(request(last), 8)
    await cell.leases.dispatch(placement(request_id=last))
    assert await cell.leases.requeue(last, 1, "decode died", 1, lost=D) == "failed"
    assert await cell.link.client.smembers(cell.keys.open(GW)) == set()
    assert await cell.leases.states([R, last]) == ["ended", "ended"]


async def test_a_cancelled_request_leaves_the_prefill_workers_list(cell: Cell) -> None:
    """Prefill gives nothing back by itself: the script does it."""
    await dispatched(cell)
    await cell.leases.cancel(R, "gone")
    assert await cell.roster.held(P) == []
    assert await cell.roster.held(D) == [(R, 1)], "until decode has dropped its blocks"


async def test_a_deadline_of_a_later_clock_is_pulled_in(cell: Cell) -> None:
    """Redis' clock went back by an hour: nobody stays alive for so long; deadlines of now stay as they are."""
    fence = await dispatched(cell)
    await cell.leases.accept(fence, P, "prefill", 5)
    client, keys = cell.link.client, cell.keys
    assert await cell.roster.pull_in_deadlines(5) == 0
    now_ms = await cell.leases.redis_now_ms()
    for key, member in ((keys.workers(), D), (keys.gateways(), GW), (keys.leases(), R)):
        await client.zincrby(key, 3_600_000, member)
    before = await client.zscore(keys.workers(), P)
    assert await cell.roster.pull_in_deadlines(5) == 3
    for key, member in ((keys.workers(), D), (keys.gateways(), GW), (keys.leases(), R)):
        assert now_ms < await client.zscore(key, member) < now_ms + 600_000
    assert await client.zscore(keys.workers(), P) == before
