"""Questions to the prefix index: answers steer placement, silence never stops it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from shared.clock import ManualClock
from shared.config import SchedulerConfig
from shared.ids import Incarnation
from shared.messages import Cleared, KvEvents, MatchReply, Stored
from tests.unit.scheduler.cell import Cell, registration_of, request_of
from tests.unit.scheduler.conftest import Desk, desk_of

pytestmark = pytest.mark.anyio
TIMEOUT_S = SchedulerConfig().index_timeout_s


@pytest.fixture
def desk(cell: Cell, clock: ManualClock) -> Desk:
    return desk_of(cell, clock)


@asynccontextmanager
async def listening(desk: Desk, with_index: bool) -> AsyncIterator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.scheduler.hints.listen)
        if with_index:
            tasks.start_soon(desk.index.run)
        await anyio.wait_all_tasks_blocked()
        yield tasks
        tasks.cancel_scope.cancel()


async def fleet(cell: Cell, *names: str) -> None:
    for name in names:
        await cell.join(registration_of(name, "prefill" if name[0] == "p" else "decode"))


async def test_hits_keep_a_prompt_on_decode(cell: Cell, desk: Desk) -> None:
    """What the index knows of a decode worker decides that no handoff is needed."""
    await fleet(cell, "p0", "d0", "d1")
    await desk.start()
    request = request_of("a", num_tokens=40)
    async with listening(desk, with_index=True):
        events = (Cleared(), Stored(hashes=request.block_hashes))  # the answer to the index's first question
        await cell.bus.publish(
            cell.keys.kv(), KvEvents(incarnation=Incarnation("d1"), fingerprint="f", seq=1, events=events)
        )
        await anyio.wait_all_tasks_blocked()
        await cell.admit(request)
        await desk.step()
    assert cell.placed("a") == (None, "d1")
    assert desk.scheduler.stats().num_hints_asked == 1
    assert desk.scheduler.stats().num_hints_unanswered == 0


async def test_a_silent_index_delays_once_and_then_not_at_all(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """The first question waits for the time-out, the following requests do not, and one late answer restores trust."""
    await fleet(cell, "p0", "d0")
    await desk.start()
    hints = desk.scheduler.hints
    async with listening(desk, with_index=False) as tasks:
        await cell.admit(request_of("a"))
        tasks.start_soon(desk.step)
        await anyio.wait_all_tasks_blocked()
        assert cell.order == []
        clock.advance(TIMEOUT_S)
        await anyio.wait_all_tasks_blocked()
        assert cell.order == ["a"]
        assert hints.num_unanswered == 1
        for name in ("b", "c"):
            await cell.admit(request_of(name))
            await desk.step()
        assert cell.order == ["a", "b", "c"]
        assert hints.num_asked == 1
        clock.advance(1.0)
        await cell.admit(request_of("early"))
        await desk.step()
        assert hints.num_asked == 1, "the first question still lies there: another one would only fill Redis"
        questions = cell.bus.reader(cell.keys.index())
        await questions.ack(await questions.next())  # an index takes it, and does not answer
        clock.advance(1.0)
        await cell.admit(request_of("probe"))
        await desk.step()
        assert hints.num_asked == 2
        await cell.bus.publish(cell.keys.reply(Incarnation("scheduler-0")), MatchReply(query_id=2, num_blocks={}))
        await anyio.wait_all_tasks_blocked()
        await cell.admit(request_of("d"))
        tasks.start_soon(desk.step)
        await anyio.wait_all_tasks_blocked()
        assert cell.order[-1] == "probe"
        clock.advance(TIMEOUT_S)
        await anyio.wait_all_tasks_blocked()
        assert cell.order[-1] == "d"


async def test_a_full_system_asks_nothing(cell: Cell, desk: Desk) -> None:
    """While the head does not fit anyway, the index is left in peace."""
    await cell.join(registration_of("d0", "decode", num_blocks=10))
    await desk.start()
    async with listening(desk, with_index=True):
        for i in range(20):
            await cell.admit(request_of(f"r{i}", num_tokens=100, max_tokens=16))
        await desk.step()
        assert cell.order == ["r0"]
        asked = desk.scheduler.hints.num_asked
        for _ in range(3):
            await cell.refund("r0", 0)
            await desk.step()
        assert desk.scheduler.hints.num_asked == asked <= 3
