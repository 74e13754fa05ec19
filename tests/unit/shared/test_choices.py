"""Requests of several choices on a real Redis: a log for each, told of together, gone together."""

import msgspec
import pytest

from shared.messages import EpochRaised, Finished, Tokens
from tests.unit.shared.cell import A1, GW, Cell, D, P, R, dispatched, request

pytestmark = pytest.mark.anyio


async def test_a_requeued_request_knows_what_each_choice_has_said(cell: Cell) -> None:
    """The marker has every log's length, the next worker every log."""
    three = msgspec.structs.replace(request(), num_choices=3)
    await dispatched(cell, three)
    said = [Tokens(R, 1, 0, 0, (11, 12)), Tokens(R, 1, 1, 0, (21,)), Tokens(R, 1, 2, 0, (31, 32))]
    assert await cell.leases.emit(GW, [(tokens, A1) for tokens in said]) == [True] * 3
    assert await cell.leases.requeue(R, 1, "decode died", 3, lost=D) == "requeued"
    assert (await cell.seen(cell.keys.tokens(GW)))[-1] == EpochRaised(R, 2, 2, (1, 2))
    state = await cell.leases.load(R)
    assert state is not None
    assert state.outputs == ((11, 12), (21,), (31, 32))


async def test_a_request_that_redis_lost_comes_back_with_all_its_choices(cell: Cell) -> None:
    """From what its gateway knows."""
    three = msgspec.structs.replace(request(), num_choices=3)
    await cell.roster.greet(GW)
    assert await cell.leases.readmit(three, 2, (11,), (), (31, 32)) == "admitted"
    state = await cell.leases.load(R)
    assert state is not None
    assert state.outputs == ((11,), (), (31, 32))


@pytest.mark.parametrize("how", ["complete", "cancel"])
async def test_all_logs_expire_with_the_request(cell: Cell, how: str) -> None:
    """None of them stays in Redis for ever."""
    three = msgspec.structs.replace(request(), num_choices=3)
    fence = await dispatched(cell, three)
    await cell.leases.emit(GW, [(Tokens(R, 1, c, 0, (5,)), A1) for c in range(3)])
    if how == "cancel":
        assert await cell.leases.cancel(R, "client gone")
    else:
        assert await cell.leases.complete(fence, GW, Finished(R, 1, "length", 1, 0, "", (1, 1)), D, P)
    for choice in range(3):
        assert 0 < await cell.link.client.pttl(cell.keys.log(R, choice)) <= 60_000
