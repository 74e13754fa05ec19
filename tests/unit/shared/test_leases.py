"""The Lua face, script by script, on a real Redis: fences, credit, log, and who is told."""

from dataclasses import replace
from typing import Any

import pytest

from shared.bus import RedisBus
from shared.clock import SystemClock
from shared.config import LeaseConfig, RedisConfig
from shared.errors import BusError
from shared.ids import Incarnation, RequestId
from shared.keys import NOBODY, Keys
from shared.leases import FOREVER_MS, Leases
from shared.messages import (
    Admitted,
    Cancel,
    CreditFreed,
    DecodeTask,
    Ended,
    EpochRaised,
    Finished,
    PrefillTask,
    Tokens,
    WorkerJoined,
)
from shared.randomness import SeededRandomness
from shared.redis_link import RedisLink
from shared.roster import Roster
from shared.worker_link import Buried, WorkerLink
from tests.unit.shared.cell import A1, A2, GW, Cell, D, P, R, dispatched, placement, registration, request

pytestmark = pytest.mark.anyio


async def test_admit_is_bounded_and_idempotent(cell: Cell) -> None:
    """A full queue takes nothing, and the same id enters once."""
    assert await cell.leases.admit(request(), 1) == "admitted"
    assert await cell.leases.admit(request(), 1) == "duplicate"
    assert await cell.leases.admit(request(RequestId("cmpl-2")), 1) == "full"
    assert await cell.leases.queued() == [Admitted(request_id=R, epoch=1)]
    assert await cell.seen(cell.keys.sched()) == [Admitted(request_id=R, epoch=1)]
    state = await cell.leases.load(R)
    assert state is not None
    assert (state.request, state.epoch, state.output) == (request(), 1, ())


async def test_dispatch_takes_credit_and_writes_both_tasks_once(cell: Cell) -> None:
    """The same attempt again changes nothing; another attempt comes too late."""
    await dispatched(cell)
    assert await cell.taken() == 4
    assert await cell.leases.dispatch(placement()) == "dispatched"
    assert await cell.leases.dispatch(placement(attempt=A2)) == "stale"
    assert await cell.taken() == 4
    assert [type(m) for m in await cell.seen(cell.keys.work(P))] == [PrefillTask]
    assert [type(m) for m in await cell.seen(cell.keys.work(D))] == [DecodeTask]
    assert await cell.leases.queued() == []


@pytest.mark.parametrize("num_waiting", [1, 2, 3])
async def test_credit_is_never_promised_twice(cell: Cell, num_waiting: int) -> None:
    """Ten blocks carry two requests of four; the third waits until one ends."""
    await dispatched(cell)
    answers = []
    for n in range(num_waiting):
        other = RequestId(f"other-{n}")
        await cell.leases.admit(request(other), 8)
        answers.append(await cell.leases.dispatch(placement(request_id=other)))
    assert answers == ["dispatched", "no_credit", "no_credit"][:num_waiting]
    assert await cell.taken() == 8


async def test_a_deposed_scheduler_cannot_dispatch(cell: Cell) -> None:
    """A newer term fences the older leader."""
    await dispatched(cell)
    other = RequestId("other")
    await cell.leases.admit(request(other), 8)
    await cell.leases.lead(Incarnation("s2"))
    assert await cell.leases.dispatch(placement(request_id=other)) == "deposed"
    assert await cell.leases.dispatch(placement(request_id=other, term=2)) == "dispatched"


async def test_draining_and_dead_workers_get_nothing(cell: Cell) -> None:
    """Dispatch looks at the worker's state inside the script."""
    await dispatched(cell)
    other = RequestId("other")
    await cell.leases.admit(request(other), 8)
    await cell.roster.retire(P, "draining")
    assert await cell.leases.dispatch(placement(request_id=other)) == "worker_gone"
    alone = replace(placement(request_id=other), prefill=None, prefill_task=None)
    assert await cell.leases.dispatch(alone) == "dispatched"


async def test_the_lease_goes_from_prefill_to_decode_and_not_back(cell: Cell) -> None:
    """After decode's accept, prefill's renewals say and its accept say `handed_on`."""
    fence = await dispatched(cell)
    assert await cell.leases.accept(fence, P, "prefill", 5) == "held"
    assert await cell.leases.renew(P, [fence], 5) == ["held"]
    assert await cell.leases.accept(fence, D, "decode", 5, prefill=P) == "held"
    assert await cell.leases.renew(P, [fence], 5) == ["handed_on"]
    assert await cell.leases.accept(fence, P, "prefill", 5) == "handed_on"
    assert await cell.leases.renew(D, [fence, replace(fence, attempt=A2)], 5) == ["held", "stale"]
    assert await cell.link.client.hgetall(cell.keys.held(P)) == {}


async def test_prefill_hears_that_decode_computes_the_prompt(cell: Cell) -> None:
    """As often as decode must ask, and not where it goes on with prefill's blocks, or nobody else was to compute it."""
    fence = await dispatched(cell)
    assert await cell.leases.accept(replace(fence, attempt=A2), D, "decode", 5, P, in_vain=True) == "stale"
    assert await cell.leases.accept(fence, D, "decode", 5, P) == "held"
    assert await cell.seen(cell.keys.control(P)) == []
    for _ in range(2):
        assert await cell.leases.accept(fence, D, "decode", 5, P, in_vain=True) == "held"
        assert [(m.request_id, m.epoch) for m in await cell.seen(cell.keys.control(P))] == [(R, 1)]
        assert await cell.link.client.pttl(cell.keys.control(P).key) != -1
    assert await cell.leases.accept(fence, D, "decode", 5, in_vain=True) == "held"
    assert await cell.seen(cell.keys.control(NOBODY)) == []


async def test_emit_appends_to_the_log_and_drops_repeats_and_strangers(cell: Cell) -> None:
    """One entry per call; an old attempt's tokens go nowhere; what the log has is not sent again."""
    fence = await dispatched(cell)
    first, both = Tokens(R, 1, 0, 0, (11,)), Tokens(R, 1, 0, 0, (11, 12))
    assert await cell.leases.emit(GW, [(first, A1)]) == [True]
    assert await cell.leases.emit(GW, [(first, A2), (both, A1)]) == [False, True]
    assert await cell.leases.emit(GW, [(first, A1)]) == [True]
    assert await cell.leases.token_log(R) == (11, 12)
    assert await cell.seen(cell.keys.tokens(GW)) == [first, both]
    assert await cell.leases.renew(D, [fence], 5) == ["stale"], "nobody has accepted it"


async def test_complete_ends_it_once_and_gives_the_credit_back(cell: Cell) -> None:
    """Finished goes out once; the record cannot be loaded, renewed or emitted to any more."""
    fence = await dispatched(cell)
    await cell.leases.accept(fence, D, "decode", 5, prefill=P)
    finished = Finished(R, 1, "length", num_output_tokens=1)
    assert not await cell.leases.complete(replace(fence, attempt=A2), GW, finished, D, P)
    assert await cell.leases.complete(fence, GW, finished, D, P)
    assert not await cell.leases.complete(fence, GW, finished, D, P)
    assert await cell.seen(cell.keys.tokens(GW)) == [finished]
    assert await cell.seen(cell.keys.sched()) == [Ended(request_id=R)]
    assert await cell.taken() == 0
    assert await cell.leases.load(R) is None
    assert await cell.leases.emit(GW, [(Tokens(R, 1, 0, 0, (1,)), A1)]) == [False]
    assert await cell.leases.expired() == []


async def test_cancel_tells_every_holder_and_keeps_the_credit_until_the_work_is_dropped(cell: Cell) -> None:
    """Blocks that decode still holds are not promised to others."""
    fence = await dispatched(cell)
    assert await cell.leases.cancel(R, "client gone")
    assert not await cell.leases.cancel(R, "client gone")
    want = [Cancel(request_id=R, epoch=1, reason="client gone")]
    assert await cell.seen(cell.keys.control(P)) == want
    assert await cell.seen(cell.keys.control(D)) == want
    assert await cell.seen(cell.keys.tokens(GW)) == [Finished(R, 1, "cancelled", error="client gone")]
    assert await cell.leases.accept(fence, D, "decode", 5) == "stale"
    assert await cell.taken() == 4
    assert await cell.leases.refund(D, R, 1) == 4
    assert await cell.leases.refund(D, R, 1) == 0
    assert await cell.taken() == 0


async def test_cancel_of_a_waiting_request_leaves_nothing_queued(cell: Cell) -> None:
    """Dispatch refuses what was cancelled."""
    await cell.roster.register(registration(D, "decode"))
    await cell.roster.register(registration(P, "prefill"))
    await cell.leases.lead(Incarnation("s1"))
    await cell.leases.admit(request(), 8)
    assert await cell.leases.cancel(R, "gone")
    assert await cell.leases.queued() == []
    assert await cell.leases.dispatch(placement()) == "stale"
    assert await cell.taken() == 0


async def test_refund_of_hits_never_gives_back_more_than_was_taken(cell: Cell) -> None:
    """A part, once however often it is said, then the rest."""
    await dispatched(cell)
    assert await cell.leases.refund(D, R, 1, keep=1) == 3
    assert await cell.leases.refund(D, R, 1, keep=1) == 0
    assert await cell.leases.refund(D, R, 1, keep=3) == 0
    assert await cell.taken() == 1
    assert await cell.leases.refund(D, R, 1) == 1
    assert await cell.taken() == 0
    assert CreditFreed(incarnation=D) in await cell.seen(cell.keys.sched())


async def test_requeue_raises_the_epoch_and_keeps_the_tokens(cell: Cell) -> None:
    """The next holder begins where the client's text ends, and the old one is fenced."""
    fence = await dispatched(cell)
    await cell.leases.accept(fence, D, "decode", 0.001, prefill=P)
    await cell.leases.emit(GW, [(Tokens(R, 1, 0, 0, (11, 12)), A1)])
    await cell.link.client.execute_command("PING")
    assert (R, 1) in await _until_expired(cell)
    assert await cell.leases.requeue(R, 1, "lease ran out", 3) == "requeued"
    assert await cell.leases.requeue(R, 1, "lease ran out", 3) == "stale"
    state = await cell.leases.load(R)
    assert state is not None
    assert (state.epoch, state.output, state.token_ids) == (2, (11, 12), (5, 6, 7, 11, 12))
    assert await cell.leases.emit(GW, [(Tokens(R, 1, 0, 2, (13,)), A1)]) == [False]
    assert (await cell.seen(cell.keys.tokens(GW)))[-1] == EpochRaised(R, 2, 2)
    assert Admitted(request_id=R, epoch=2) in await cell.seen(cell.keys.sched())
    assert await cell.seen(cell.keys.control(D)) == [Cancel(request_id=R, epoch=1, reason="lease ran out")]
    assert await cell.leases.dispatch(placement(epoch=2, attempt=A2)) == "dispatched"
    assert await cell.taken() == 8, "the old decode worker has not dropped its blocks yet"
    assert await cell.leases.refund(D, R, 1) == 4


async def _until_expired(cell: Cell) -> list:
    for _ in range(200):
        if expired := await cell.leases.expired():
            return expired
    return []


async def test_a_live_lease_is_not_requeued(cell: Cell) -> None:
    """The script looks at the deadline itself."""
    fence = await dispatched(cell)
    await cell.leases.accept(fence, D, "decode", 30, prefill=P)
    assert await cell.leases.requeue(R, 1, "lease ran out", 3) == "stale"
    assert await cell.leases.requeue(R, 1, "prefill died", 3, lost=P) == "stale", "decode has it by now"
    assert await cell.leases.requeue(R, 1, "decode died", 3, lost=D) == "requeued"


async def test_a_request_that_kills_workers_fails_after_its_attempts(cell: Cell) -> None:
    """Three attempts, then Finished(error), once."""
    await dispatched(cell)
    for epoch in (1, 2):
        assert await cell.leases.requeue(R, epoch, "decode died", 3, lost=D) == "requeued"
        assert await cell.leases.dispatch(placement(epoch=epoch + 1, attempt=A2, credit=1)) == "dispatched"
    assert await cell.leases.requeue(R, 3, "decode died", 3, lost=D) == "failed"
    events = await cell.seen(cell.keys.tokens(GW))
    assert [type(e) for e in events] == [EpochRaised, EpochRaised, Finished]
    assert events[-1].reason == "error"
    assert await cell.leases.load(R) is None


async def test_a_dead_worker_is_buried_and_its_work_listed(redis_url: str) -> None:
    """Overdue, fenced, emptied, forgotten; its old incarnation cannot come back."""
    link = RedisLink(RedisConfig(url=redis_url), SystemClock())
    keys = Keys("test")
    cell = Cell(
        Leases(link, keys, SeededRandomness(1)), Roster(link, keys, 1.0), RedisBus(link, SystemClock()), keys, link
    )
    await cell.roster.greet(GW)
    await dispatched(cell)
    assert await cell.roster.bury(D, FOREVER_MS) is None, "it is not overdue"
    await cell.roster.retire(D, "dead")
    assert await cell.roster.dead_workers() == [D]
    assert await cell.roster.bury(D, FOREVER_MS) == [(R, 1)]
    assert await cell.leases.requeue(R, 1, "decode died", 3, lost=D) == "requeued"
    await cell.roster.forget(D)
    assert await cell.roster.dead_workers() == []
    assert not await cell.roster.heartbeat(D)
    assert [v.registration.incarnation for v in await cell.roster.workers()] == [P]
    assert WorkerJoined(incarnation=D) not in await cell.seen(cell.keys.sched())
    await link.close()


async def test_fail_ends_a_waiting_request(cell: Cell) -> None:
    """For what no worker can ever serve."""
    await cell.leases.admit(request(), 8)
    assert await cell.leases.fail(R, 1, "the prompt needs more blocks than any worker has")
    assert not await cell.leases.fail(R, 1, "again")
    (finished,) = await cell.seen(cell.keys.tokens(GW))
    assert finished.reason == "error"
    assert "more blocks" in finished.error


async def test_the_deployment_key_is_made_once(cell: Cell) -> None:
    """Whoever asks second gets the first one's."""
    first = await cell.leases.deployment_key()
    other = Leases(cell.link, cell.keys, SeededRandomness(2))
    assert len(first) == 32
    assert await other.deployment_key() == first


class Forgetful:
    """A client whose Redis loses everything after each of the first few times that a key was made."""

    def __init__(self, client: Any, num_losses: int) -> None:
        self._client, self._num_losses = client, num_losses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def setnx(self, key: str, value: str) -> Any:
        made = await self._client.setnx(key, value)
        if self._num_losses:
            self._num_losses -= 1
            await self._client.flushdb()
        return made


@pytest.mark.parametrize(("num_losses", "is_made"), [(1, True), (100, False)])
async def test_a_deployment_key_that_is_lost_at_once_is_made_again(cell: Cell, num_losses: int, is_made: bool) -> None:
    """A worker that starts just when Redis loses everything; one that loses it for ever is an error of the bus."""
    cell.link.client = Forgetful(cell.link.client, num_losses)
    if is_made:
        assert len(await cell.leases.deployment_key()) == 32
        return
    with pytest.raises(BusError, match="again and again"):
        await cell.leases.deployment_key()


async def test_a_worker_with_the_secret_of_a_lost_cell_does_not_work(cell: Cell) -> None:
    """Redis lost everything between its reading the secret and its registration: no capability would ever fit."""
    secret = await cell.leases.deployment_key()
    await cell.link.client.flushdb()
    clock, duties = SystemClock(), None
    link = WorkerLink(
        *(registration(P, "prefill"), duties, cell.bus, cell.keys, cell.leases, cell.roster, clock, LeaseConfig()),
        secret=secret,
    )
    with pytest.raises(Buried, match="lost everything"):
        await link.beat()


async def test_a_step_of_any_size_is_emitted(cell: Cell) -> None:
    """More items than Lua unpacks at once: all go out, in order."""
    await dispatched(cell)
    items = [(Tokens(R, 1, 0, i, (i,)), A1) for i in range(5000)]
    assert await cell.leases.emit(GW, items) == [True] * 5000
    assert await cell.leases.token_log(R) == tuple(range(5000))
    assert await cell.seen(cell.keys.tokens(GW)) == [tokens for tokens, _ in items]
