"""Who is dead, and what becomes of what they held."""

import pytest

from shared.clock import ManualClock
from shared.config import LeaseConfig
from shared.errors import BusError
from shared.ids import Incarnation, RequestId
from shared.messages import WorkerGone
from tests.unit.scheduler.cell import Cell, registration_of, request_of
from tests.unit.scheduler.conftest import Desk

pytestmark = pytest.mark.anyio
LEASE_S = LeaseConfig().lease_s


async def a_running_request(cell: Cell, desk: Desk, name: str = "a") -> None:
    """Two decode workers, one request on the first."""
    await cell.join(registration_of("d0", "decode"))
    await cell.join(registration_of("d1", "decode"))
    await desk.start()
    await cell.admit(request_of(name))
    await desk.step()
    assert cell.placed(name) == (None, "d0")


async def test_a_dead_workers_request_goes_on_elsewhere(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """Buried, requeued at the next epoch, dispatched to a live worker, and the index is told."""
    await a_running_request(cell, desk)
    clock.advance(LEASE_S)
    cell.fleet[Incarnation("d0")].heard = False
    await desk.scheduler.reaper.look()
    await desk.step()
    record = cell.records[RequestId("a")]
    assert (record.epoch, cell.placed("a")) == (2, (None, "d1"))
    assert Incarnation("d0") not in cell.fleet
    (delivery,) = await cell.bus.reader(cell.keys.kv()).next(0)
    assert delivery.messages == (WorkerGone(incarnation=Incarnation("d0")),)
    stats = desk.scheduler.stats()
    assert (stats.num_buried, stats.num_requeued, stats.num_in_flight) == (1, 1, 1)


async def test_an_expired_lease_is_requeued(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """The worker may live: its request goes round, the ledger forgets the old placement."""
    await a_running_request(cell, desk)
    clock.advance(LEASE_S)
    cell.overdue = [(RequestId("a"), 1)]
    await desk.scheduler.reaper.look()
    await desk.step()
    assert cell.records[RequestId("a")].epoch == 2
    assert desk.scheduler.stats().num_in_flight == 1


async def test_a_request_that_kills_workers_ends(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """After max_attempts it fails instead of going round again."""
    await a_running_request(cell, desk)
    clock.advance(LEASE_S)
    for epoch in (1, 2, 3):
        cell.overdue = [(RequestId("a"), epoch)]
        await desk.scheduler.reaper.look()
        await desk.step()
    record = cell.records[RequestId("a")]
    assert (record.state, record.epoch) == ("done", 3)
    stats = desk.scheduler.stats()
    assert (stats.num_given_up, stats.num_in_flight) == (1, 0)


async def test_nothing_is_reaped_for_a_lease_period_after_the_start(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """To the moment: workers may have been cut off as long as the scheduler was away."""
    await a_running_request(cell, desk)
    cell.fleet[Incarnation("d0")].heard = False
    clock.advance(LEASE_S - 0.001)
    await desk.scheduler.reaper.look()
    assert "bury" not in cell.calls
    clock.advance(0.001)
    await desk.scheduler.reaper.look()
    assert cell.calls["bury"] == 1


async def test_nothing_is_reaped_for_a_lease_period_after_an_outage(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """An outage that the link noticed silences the reaper anew."""
    await a_running_request(cell, desk)
    clock.advance(10 * LEASE_S)
    cell.overdue, cell.last_outage = [(RequestId("a"), 1)], clock.now() - 1.0
    await desk.scheduler.reaper.look()
    assert "requeue" not in cell.calls
    clock.advance(LEASE_S - 1.0)
    await desk.scheduler.reaper.look()
    assert cell.calls["requeue"] == 1


async def test_a_slow_answer_counts_as_an_outage(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """A Redis that stood still gave nobody the chance to renew, though no call failed."""
    await a_running_request(cell, desk)
    clock.advance(10 * LEASE_S)

    async def frozen():
        clock.advance(4.0)
        return [(RequestId("a"), 1)]

    cell.expired = frozen  # type: ignore[method-assign]
    await desk.scheduler.reaper.look()
    assert "requeue" not in cell.calls


async def test_a_worker_that_comes_back_is_not_buried(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """Overdue at the look, alive at the burial: Redis decides, nothing happens."""
    await a_running_request(cell, desk)
    clock.advance(LEASE_S)

    async def overdue():
        return [Incarnation("d0")]

    cell.dead_workers = overdue  # type: ignore[method-assign]
    await desk.scheduler.reaper.look()
    assert cell.calls["bury"] == 1
    assert Incarnation("d0") in cell.fleet
    assert desk.scheduler.stats().num_buried == 0


@pytest.mark.parametrize("late", ["bury", "bury_gateway", "requeue"])
async def test_a_decision_does_not_outlive_an_outage(cell: Cell, desk: Desk, clock: ManualClock, late: str) -> None:
    """Redis goes away just before the script and comes back: whoever came to life meanwhile could not say so."""
    await a_running_request(cell, desk)
    clock.advance(LEASE_S)
    cell.silent_gateways[Incarnation("gateway-0")] = []
    cell.fleet[Incarnation("d1")].heard = False
    cell.overdue = [(RequestId("a"), 1)]
    real = getattr(cell, late)

    async def held_up(*args, **kwargs):
        clock.advance(LeaseConfig().heartbeat_s + 0.1)
        return await real(*args, **kwargs)

    setattr(cell, late, held_up)
    await desk.scheduler.reaper.look()
    stats, what = desk.scheduler.stats(), ("bury", "bury_gateway", "requeue")
    done = (stats.num_buried, stats.num_gateways_buried, stats.num_requeued)
    assert done == tuple(int(what.index(one) < what.index(late)) for one in what)


async def test_a_burial_that_was_cut_off_is_finished(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """Redis lost between bury and requeue: the next look finds the worker and its requests again."""
    await a_running_request(cell, desk)
    clock.advance(LEASE_S)
    cell.fleet[Incarnation("d0")].heard = False
    real = cell.requeue

    async def lost(*_args, **_kwargs):
        raise BusError("redis does not answer")

    cell.requeue = lost  # type: ignore[method-assign]
    with pytest.raises(BusError):
        await desk.scheduler.reaper.look()
    cell.requeue = real  # type: ignore[method-assign]
    await desk.scheduler.reaper.look()
    await desk.step()
    assert cell.placed("a") == (None, "d1")
    assert Incarnation("d0") not in cell.fleet


async def test_a_silent_gateways_requests_are_cancelled(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """Nobody reads the answers: no work goes on for them, and the gateway is forgotten last."""
    await a_running_request(cell, desk)
    cell.silent_gateways[Incarnation("gateway-0")] = [RequestId("a")]
    await desk.scheduler.reaper.look()
    assert "bury_gateway" not in cell.calls, "not within a lease period of the start"
    clock.advance(LEASE_S)
    await desk.scheduler.reaper.look()
    await desk.step()
    record = cell.records[RequestId("a")]
    assert (record.state, record.error) == ("done", "its gateway died")
    assert not cell.silent_gateways
    assert desk.scheduler.stats().num_gateways_buried == 1


async def test_the_length_of_every_stream_is_measured(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """What nobody consumes shows in the metrics."""
    await a_running_request(cell, desk)
    await cell.bus.publish(cell.keys.kv(), WorkerGone(incarnation=Incarnation("x")))
    clock.advance(LEASE_S)
    await desk.scheduler.reaper.look()
    lengths = desk.scheduler.stats().num_stream_entries
    assert lengths["kv"] == 1
    assert lengths["work"] == cell.bus.depth(cell.keys.work(Incarnation("d0")))


async def test_a_jump_of_redis_clock_kills_nobody(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """Set forward, it makes every deadline look missed; the living renew within a lease period."""
    await a_running_request(cell, desk)
    clock.advance(2 * LEASE_S)
    await desk.scheduler.reaper.look()
    cell.time_jump_s, cell.overdue = 3600.0, [(RequestId("a"), 1)]
    await desk.scheduler.reaper.look()
    assert "requeue" not in cell.calls
    clock.advance(LEASE_S)
    await desk.scheduler.reaper.look()
    assert cell.calls["requeue"] == 1, "who has not renewed by then is lost"


async def test_a_jump_in_the_middle_of_a_look_kills_nobody_either(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """Redis' clock is set forward when the look has begun: who is overdue by it was not a moment before."""
    await a_running_request(cell, desk)
    clock.advance(2 * LEASE_S)
    await desk.scheduler.reaper.look()

    async def overdue():
        cell.time_jump_s = 3600.0
        return [Incarnation("d0")]

    cell.dead_workers = overdue  # type: ignore[method-assign]
    await desk.scheduler.reaper.look()
    assert "bury" not in cell.calls


async def test_deadlines_are_pulled_in_when_redis_clock_goes_back(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """And at the start, as it may have gone back before; not while it only runs on."""
    for _ in range(3):
        clock.advance(LEASE_S)
        await desk.scheduler.reaper.look()
    assert cell.calls["pull_in_deadlines"] == 1
    cell.time_jump_s = -3600.0
    await desk.scheduler.reaper.look()
    await desk.scheduler.reaper.look()
    assert cell.calls["pull_in_deadlines"] == 2
