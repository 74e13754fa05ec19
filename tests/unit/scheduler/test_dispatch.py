"""From admitted to dispatched, on a cell in memory."""

import pytest

from services.scheduler.intake import RESYNC_EVERY_S
from services.scheduler.ports import Deposed
from shared.capability import verify
from shared.clock import ManualClock
from shared.errors import BusError
from shared.ids import Incarnation, RequestId
from shared.messages import CreditFreed, Ended, WorkerDraining
from tests.unit.scheduler.cell import Cell, registration_of, request_of
from tests.unit.scheduler.conftest import Desk

pytestmark = pytest.mark.anyio


async def test_a_long_prompt_is_handed_off_with_a_capability(cell: Cell, desk: Desk) -> None:
    """Prefill and decode get tasks of one epoch and attempt, and decode what lets it read from prefill."""
    await cell.join(registration_of("p0", "prefill"))
    await cell.join(registration_of("d0", "decode"))
    await desk.start()
    await cell.admit(request_of("a", num_tokens=40, max_tokens=8))
    await desk.step()
    d = cell.records[RequestId("a")].dispatch
    assert d
    assert d.prefill_task
    source = d.decode_task.source
    assert source
    assert (d.decode, d.prefill, d.credit_blocks, d.term) == ("d0", "p0", 3, 1)
    assert (source.worker_id, source.incarnation) == ("p0", "p0")
    assert d.prefill_task.reader == "d0"
    for task in (d.prefill_task, d.decode_task):
        assert (task.request_id, task.epoch, task.attempt, task.term) == ("a", 1, d.attempt, 1)
        assert task.num_prompt_tokens == 40
    assert d.decode_task.credit_blocks == 3
    assert verify(source.capability, b"k" * 32, RequestId("a"), 1, d.attempt, Incarnation("p0"), Incarnation("d0"))
    assert desk.scheduler.stats().num_handoffs == 1


async def test_a_short_prompt_stays_on_decode(cell: Cell, desk: Desk) -> None:
    """Below min_handoff_tokens the decode task has no source."""
    await cell.join(registration_of("p0", "prefill"))
    await cell.join(registration_of("d0", "decode"))
    await desk.start()
    await cell.admit(request_of("a", num_tokens=16))
    await desk.step()
    assert cell.placed("a") == (None, "d0")
    assert cell.fleet[Incarnation("p0")].held == {}


async def test_load_is_spread(cell: Cell, desk: Desk) -> None:
    """Equal requests go round over equal workers."""
    for name in ("p0", "p1"):
        await cell.join(registration_of(name, "prefill"))
    for name in ("d0", "d1"):
        await cell.join(registration_of(name, "decode"))
    await desk.start()
    for i in range(12):
        await cell.admit(request_of(f"r{i}"))
    await desk.step()
    placements = [cell.placed(f"r{i}") for i in range(12)]
    for name in ("p0", "p1"):
        assert sum(p[0] == name for p in placements if p) == 6
    for name in ("d0", "d1"):
        assert 5 <= sum(p[1] == name for p in placements if p) <= 7


async def test_finished_prefills_no_longer_count(cell: Cell, desk: Desk) -> None:
    """Once decode has taken over, the prefill worker's queue is empty again for placement."""
    for name in ("p0", "p1"):
        await cell.join(registration_of(name, "prefill"))
    await cell.join(registration_of("d0", "decode", num_blocks=1000))
    await desk.start()
    await cell.admit(request_of("long", num_tokens=400))
    await cell.admit(request_of("b"))
    await desk.step()
    assert [cell.placed(n) for n in ("long", "b")] == [("p0", "d0"), ("p1", "d0")]
    cell.hand_over("long")
    await desk.scheduler.reaper.look()
    await cell.admit(request_of("c"))
    await desk.step()
    assert cell.placed("c") == ("p0", "d0")


async def test_without_workers_requests_wait(cell: Cell, desk: Desk) -> None:
    """Nothing is refused while nobody is there; the first worker gets the work."""
    await desk.start()
    await cell.admit(request_of("a"))
    await desk.step()
    assert desk.scheduler.stats().num_waiting == 1
    await cell.join(registration_of("d0", "decode"))
    await desk.step()
    assert cell.placed("a") == (None, "d0")


async def test_the_head_waits_and_nobody_overtakes_it(cell: Cell, desk: Desk) -> None:
    """A large request at the head is not starved by small ones that would fit."""
    await cell.join(registration_of("d0", "decode", num_blocks=10))
    await desk.start()
    await cell.admit(request_of("first", num_tokens=16, max_tokens=16))
    await cell.admit(request_of("large", num_tokens=128, max_tokens=16))
    await cell.admit(request_of("small", num_tokens=16, max_tokens=16))
    await desk.step()
    assert cell.order == ["first"]
    await cell.end("first")
    await desk.step()
    assert cell.order == ["first", "large"]
    await cell.end("large")
    await desk.step()
    assert cell.order == ["first", "large", "small"]


async def test_priority_goes_first(cell: Cell, desk: Desk) -> None:
    """Lower is served first, arrival decides among equals."""
    await desk.start()
    for name, priority in (("a", 0), ("b", 0), ("c", -1), ("d", 5)):
        await cell.admit(request_of(name, priority=priority))
    await cell.join(registration_of("d0", "decode"))
    await desk.step()
    assert cell.order == ["c", "a", "b", "d"]


async def test_refunded_credit_is_used(cell: Cell, desk: Desk) -> None:
    """Blocks that decode gives back at accept let the next request in."""
    await cell.join(registration_of("d0", "decode", num_blocks=10))
    await desk.start()
    await cell.admit(request_of("a", num_tokens=100, max_tokens=16))
    await cell.admit(request_of("b", num_tokens=32, max_tokens=16))
    await desk.step()
    assert cell.order == ["a"]
    await cell.refund("a", 1)
    await desk.step()
    assert cell.order == ["a", "b"]


async def test_credit_taken_by_others_is_found_out(cell: Cell, desk: Desk) -> None:
    """A refusal by Redis leads to one fresh look, not to a loop; then the request waits."""
    await cell.join(registration_of("d0", "decode", num_blocks=10))
    await desk.start()
    await desk.step()
    await cell.admit(request_of("a", num_tokens=16, max_tokens=16))
    await desk.step()
    cell.fleet[Incarnation("d0")].taken = 10
    await cell.admit(request_of("b"))
    await desk.step()
    assert cell.order == ["a"]
    assert cell.calls["dispatch"] == 2
    cell.fleet[Incarnation("d0")].taken = 0
    await cell.bus.publish(cell.keys.sched(), CreditFreed(incarnation=Incarnation("d0")))
    await desk.step()
    assert cell.order == ["a", "b"]


async def test_a_dispatch_without_an_answer_is_sent_again(cell: Cell, desk: Desk) -> None:
    """Redis lost in the middle of a window: whoever was dispatched is not dispatched twice, the others follow."""
    await cell.join(registration_of("d0", "decode", num_blocks=1000))
    await cell.join(registration_of("d1", "decode", num_blocks=1000))
    await desk.start()
    real, answered = cell.dispatch, 0

    async def flaky(d):
        nonlocal answered
        answered += 1
        if answered == 3:
            raise BusError("never arrived")
        answer = await real(d)
        if answered == 2:
            raise BusError("arrived, but the answer was lost")
        return answer

    cell.dispatch = flaky  # type: ignore[method-assign]
    for i in range(6):
        await cell.admit(request_of(f"r{i}"))
    with pytest.raises(BusError):
        await desk.step()
    cell.dispatch = real  # type: ignore[method-assign]
    await desk.step()
    assert sorted(cell.order) == [f"r{i}" for i in range(6)]
    assert desk.scheduler.stats().num_waiting == 0
    for worker in cell.fleet.values():
        assert worker.taken == 5 * len(worker.held)


async def test_a_vanished_worker_is_replaced_at_once(cell: Cell, desk: Desk) -> None:
    """A worker that died since the last look is refused by Redis; the request goes to another."""
    await cell.join(registration_of("d0", "decode"))
    await cell.join(registration_of("d1", "decode"))
    await desk.start()
    await desk.step()
    cell.fleet[Incarnation("d0")].state = "dead"
    await cell.admit(request_of("a"))
    await desk.step()
    assert cell.placed("a") == (None, "d1")


async def test_a_draining_worker_gets_nothing(cell: Cell, desk: Desk) -> None:
    """From the message on, also before the next look at the workers."""
    await cell.join(registration_of("d0", "decode"))
    await cell.join(registration_of("d1", "decode"))
    await desk.start()
    cell.fleet[Incarnation("d0")].state = "draining"
    await cell.bus.publish(cell.keys.sched(), WorkerDraining(incarnation=Incarnation("d0")))
    for i in range(4):
        await cell.admit(request_of(f"r{i}"))
    await desk.step()
    assert {cell.placed(f"r{i}") for i in range(4)} == {(None, "d1")}


async def test_a_request_that_never_fits_fails(cell: Cell, desk: Desk) -> None:
    """It ends with a reason, and those behind it go on."""
    await cell.join(registration_of("d0", "decode", num_blocks=4))
    await desk.start()
    await cell.admit(request_of("huge", num_tokens=200))
    await cell.admit(request_of("ok", num_tokens=16, max_tokens=16))
    await desk.step()
    assert "232 tokens" in cell.records[RequestId("huge")].error
    assert cell.order == ["ok"]
    assert desk.scheduler.stats().num_failed == 1


async def test_a_cancelled_request_is_not_dispatched(cell: Cell, desk: Desk) -> None:
    """Whether its end came before or after it was queued here."""
    await desk.start()
    for name in ("a", "b"):
        await cell.admit(request_of(name))
    cell.records[RequestId("a")].state = "done"
    await desk.step()
    assert [w.request_id for w in desk.scheduler.waiting.heads(9)] == ["b"]
    await cell.end("b")
    await cell.join(registration_of("d0", "decode"))
    await desk.step()
    assert cell.order == []
    assert desk.scheduler.stats().num_waiting == 0


async def test_an_end_that_is_heard_before_the_dispatch_answer_leaves_nothing(cell: Cell, desk: Desk) -> None:
    """A very short request may be over before the scheduler knows that it began."""
    await cell.join(registration_of("d0", "decode"))
    await desk.start()
    real = cell.dispatch

    async def dispatch_and_end(d):
        answer = await real(d)
        await cell.end(d.request_id)
        deliveries = await desk.scheduler.intake._reader.next(0)
        await desk.scheduler.intake.take(deliveries)
        return answer

    cell.dispatch = dispatch_and_end  # type: ignore[method-assign]
    await cell.admit(request_of("a"))
    await desk.step()
    assert cell.order == ["a"]
    assert desk.scheduler.stats().num_in_flight == 0


async def test_repeated_messages_change_nothing(cell: Cell, desk: Desk) -> None:
    """A message that comes twice dispatches once."""
    await cell.join(registration_of("d0", "decode"))
    await desk.start()
    await cell.admit(request_of("a"))
    deliveries = await desk.scheduler.intake._reader.next(0)
    for _ in range(2):
        await desk.scheduler.intake.take(deliveries)
        await desk.scheduler.dispatcher.pump()
    assert cell.order == ["a"]
    await cell.bus.publish(cell.keys.sched(), Ended(request_id=RequestId("unknown")))
    await desk.step()
    assert desk.scheduler.stats().num_in_flight == 1


async def test_a_restart_finds_queue_and_load(cell: Cell, desk: Desk, clock: ManualClock) -> None:
    """A new scheduler dispatches what was queued and counts what runs; the old one ends at its next dispatch."""
    await cell.join(registration_of("d0", "decode"))
    await cell.join(registration_of("d1", "decode"))
    await desk.start()
    for i in range(3):
        await cell.admit(request_of(f"old{i}"))
    await desk.step()
    loaded = {d: len(cell.fleet[Incarnation(d)].held) for d in ("d0", "d1")}
    await cell.admit(request_of("new"))
    second = desk.again()
    await second.start()
    await second.scheduler.reaper._reconcile()
    assert {c.incarnation: c.num_seqs for c in second.scheduler.ledger.candidates()} == loaded
    await second.step()
    assert cell.order[3:] == ["new"]
    await cell.admit(request_of("late"))
    with pytest.raises(Deposed):
        await desk.step()
    await desk.scheduler.intake._reader.flush()
    await second.step()
    assert not cell.placed("late")  # the first one consumed the message and died of it
    clock.advance(RESYNC_EVERY_S)
    assert second.scheduler.intake._resync_due()
    await second.scheduler.intake.resync()
    await second.step()
    assert cell.placed("late")


async def test_what_does_not_fit_into_the_queue_waits_in_redis(cell: Cell, desk: Desk) -> None:
    """The queue here is bounded; the rest is fetched when there is space."""
    desk.scheduler.waiting._max_waiting = 4
    await desk.start()
    for i in range(10):
        await cell.admit(request_of(f"r{i}"))
    await desk.step()
    assert desk.scheduler.stats().num_waiting == 4
    await cell.join(registration_of("d0", "decode", num_blocks=1000))
    for num_dispatched in (4, 8):
        await desk.step()
        assert len(cell.order) == num_dispatched
        assert desk.scheduler.intake._resync_due()
        await desk.scheduler.intake.resync()
    await desk.step()
    assert cell.order == [f"r{i}" for i in range(10)]
