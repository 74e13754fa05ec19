"""A lane: one thread, in order, and whoever waits is told."""

import gc
import subprocess
import sys
import threading
import weakref

import anyio
import pytest

from shared.offload import ThreadLane

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """The services' loop, and the tests'."""
    return "asyncio", {"use_uvloop": request.param}


async def test_calls_run_in_order_in_one_thread_and_tell_what_came_of_them():
    """Values and errors, also of calls that ended long before anybody asked."""
    lane = ThreadLane()
    seen: list[int] = []
    tickets = [lane.submit(lambda i=i: (seen.append(i), threading.get_ident(), 1 // i)) for i in range(3)]
    for ticket in reversed(tickets):
        await ticket.wait()
        assert ticket.is_over
    assert seen == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        tickets[0].result()
    assert tickets[1].result()[1:] == (tickets[2].result()[1], 1)
    assert await lane.run(pow, 2, 5) == 32


async def test_waiting_may_be_bounded_given_up_and_repeated():
    """The call goes on whoever leaves; all that wait are told."""
    lane, gate, told = ThreadLane(), threading.Event(), []
    ticket = lane.submit(gate.wait)

    async def wait(seconds: float | None) -> None:
        told.append(await ticket.wait() if seconds is None else await ticket.wait_at_most(seconds))

    assert await ticket.wait_at_most(0) is False
    assert await ticket.wait_at_most(0.001) is False
    with anyio.move_on_after(0.001):
        await ticket.wait()
    assert not ticket.is_over
    async with anyio.create_task_group() as tasks:
        for seconds in (None, 100.0, None):
            tasks.start_soon(wait, seconds)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert sorted(map(str, told)) == ["None", "None", "True"]
    assert await ticket.wait_at_most(0) is True
    assert ticket.result() is True


async def test_run_waits_for_the_call_even_when_cancelled():
    """Nothing that the call writes to may be used again before it is over."""
    lane, gate = ThreadLane(), threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lane.run, gate.wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        ticket = lane.submit(len, ())
        gate.set()
    assert ticket.is_over or await ticket.wait_at_most(100)


async def test_a_lane_that_nobody_has_ends_its_thread_and_holds_no_results():
    """A worker that is started again in one process leaves no threads behind."""

    class Big:
        pass

    lane = ThreadLane("mine")
    ticket = lane.submit(Big)
    await ticket.wait()
    result = weakref.ref(ticket.result())
    await lane.run(len, ())
    del ticket
    gc.collect()
    assert result() is None
    (thread,) = [t for t in threading.enumerate() if t.name == "mine"]
    del lane
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_the_program_does_not_end_in_the_middle_of_a_call():
    """What a step uses must not go while it runs."""
    program = """
import asyncio, time
from shared.offload import ThreadLane
def call():
    time.sleep(0.3)
    print("done")
async def main():
    lane.submit(call)
lane = ThreadLane()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
