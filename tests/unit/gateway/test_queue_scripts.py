"""The scripts of submissions on a real Redis: one piece of work for an id, one owner, each token once."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.bus import RedisBus
from shared.clock import SystemClock
from shared.ids import Incarnation, RequestId
from shared.leases import Leases
from shared.messages import Admitted, Cancel, EpochRaised, Finished, GenerateRequest, Tokens
from shared.randomness import SeededRandomness
from shared.roster import Roster
from shared.submissions import ResultItem, read_entry
from tests.unit.gateway.scripts_world import DONE, KEYS, A, B, Queue, item
from tests.unit.shared.cell import A1, Cell, D, P, dispatched, request

pytestmark = pytest.mark.anyio


# --- entries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"id": "a b", "request": "{}"}, "id must have"),
        ({"id": "", "request": "{}"}, "id must have"),
        ({"id": "x" * 129, "request": "{}"}, "id must have"),
        ({"id": "a"}, "no field `request`"),
        ({"id": "a", "request": "{}", "reply": "{queue-test}:sched"}, "reply must begin"),
        ({"id": "a", "request": "{}", "reply": "{queue-test}:replies:\n"}, "reply must begin"),
        ({"id": "a", "request": "{}", "deadline_ms": "-5"}, "deadline_ms"),
        ({"id": "a", "request": "{}", "deadline_ms": "soon"}, "deadline_ms"),
        ({"nothing": "known"}, "no field `request`"),
    ],
)
def test_an_entry_that_cannot_be_served_says_why(fields: dict[str, str], fault: str) -> None:
    """It still has an id for its result, and no stream of Baton's own to reply to."""
    flat = [part.encode() for pair in fields.items() for part in pair]
    found = read_entry(KEYS, "5-0", flat)
    assert fault in found.fault
    assert found.id in ("a", "5-0")
    assert found.reply == ""


def test_an_entry_is_read_whole() -> None:
    """Unknown fields are left out; an id that is left out is the entry's own."""
    flat = [
        b"request",
        b"{}",
        b"reply",
        b"{queue-test}:replies:me",
        b"endpoint",
        b"chat",
        b"deadline_ms",
        b"50",
        b"x",
        b"y",
    ]
    found = read_entry(KEYS, "5-1", flat)
    assert (found.id, found.name, found.fault, found.written_ms) == ("5-1", "sub-5-1", "", 5)
    assert (found.reply, found.endpoint, found.deadline_ms) == ("{queue-test}:replies:me", "chat", 50)
    assert b"x" not in dict(found.raw)


# --- one piece of work, one owner -----------------------------------------------------------------------


async def test_the_same_id_twice_is_one_piece_of_work(queue: Queue) -> None:
    """The repeat is acknowledged at once, while the work is open and after its end; its own reply stream is told."""
    a = queue.gateway(A)
    first = await queue.taken(a, reply=KEYS.replies("one"))
    await queue.submit(reply=KEYS.replies("one"))
    await queue.submit(reply=KEYS.replies("two"))
    for repeat in await a.read(10, 1):
        assert await a.open(repeat) is None
        assert await a.open(repeat) is None, "asked again after a lost answer"
    assert await queue.num_pending() == 1
    assert await queue.stream(KEYS.replies("one")) == []
    [(_, told)] = await queue.stream(KEYS.replies("two"))
    assert told == {"id": "job", "duplicate": KEYS.result("job")}
    assert await a.end(first, DONE)
    await queue.submit()
    (late,) = await a.read(10, 1)
    assert await a.open(late) is None
    assert await queue.link.client.xlen(KEYS.submit()) == 0
    assert len(await queue.stream(KEYS.result("job"))) == 1


async def test_tokens_go_out_once_and_in_order(queue: Queue) -> None:
    """A repeated call writes nothing, a call that would leave a hole neither; ids say how much is out."""
    a = queue.gateway(A)
    s = await queue.taken(a, reply=KEYS.replies("one"))
    assert await a.write(s, [item(0, "ab"), item(2, "c")]) == "out"
    assert await a.write(s, [item(0, "ab"), item(2, "c")]) == "out"
    assert await a.write(s, [item(4, "e")]) == "gap"
    assert await a.write(s, [item(0, "x", choice=1), ResultItem(0, 3, (), "!", 4)]) == "out"
    assert await a.write(s, [ResultItem(0, 3, (), "!", 4)]) == "out"
    assert await a.end(s, DONE)
    assert await a.end(s, DONE)
    found = await queue.stream(KEYS.result("job"))
    assert [i for i, _ in found] == ["2-0", "3-0", "4-0", "4-1", "4-2"]
    assert found[1][1] == {"choice": "0", "offset": "2", "tokens": json.dumps([ord("c")]), "text": "c"}
    assert found[-1][1] == {"status": "200", "result": "{}"}
    assert [v for _, v in await queue.stream(KEYS.replies("one"))] == [{"id": "job", **v} for _, v in found]
    for key in (KEYS.result("job"), KEYS.replies("one"), KEYS.submission("job")):
        assert 0 < await queue.link.client.pttl(key) <= 60_000


async def test_who_takes_a_submission_over_fences_the_owner_before(queue: Queue) -> None:
    """Nothing that the old owner still says goes through, the end included; the new one learns what is out."""
    a, b = queue.gateway(A), queue.gateway(B)
    s = await queue.taken(a)
    assert await a.write(s, [item(0, "ab")]) == "out"
    assert await b.claim(60.0, 10) == [], "its owner is not silent yet"
    (again,) = await b.claim(0.0, 10)
    progress = await b.open(again)
    assert progress is not None
    assert (progress.tokens, progress.chars, progress.tries) == ({0: 2}, {0: 2}, 1)
    assert await a.write(s, [item(2, "c")]) == "lost"
    assert not await a.end(s, DONE)
    assert await a.renew([s]) == [False]
    assert await a.adopt(s, request()) == "lost"
    assert await b.renew([again]) == [True]
    assert await b.write(again, [item(2, "c")]) == "out"
    assert await b.end(again, DONE)
    assert await queue.num_pending() == 0
    assert [i for i, _ in await queue.stream(KEYS.result("job"))] == ["2-0", "3-0", "3-1"]


async def test_what_redis_lost_has_no_part_in_what_was_submitted_again(queue: Queue, cell: Cell) -> None:
    """The same id, the same gateway, another entry: the old job may neither write, end, renew nor go on."""
    gateway = queue.gateway(A)
    old = await queue.taken(gateway)
    await queue.link.client.flushdb()
    new = await queue.taken(gateway)
    item = ResultItem(0, 0, (1, 2), "1 2 ", 4)
    assert await gateway.write(old, [item]) == "lost"
    assert not await gateway.end(old, DONE)
    assert await gateway.renew([old, new]) == [False, True]
    assert await gateway.adopt(old, request()) == "lost"
    assert await queue.stream(KEYS.result("job")) == []
    assert await gateway.write(new, [item]) == "out"
    assert await gateway.end(new, DONE)


async def test_a_renewed_submission_is_not_claimed_and_a_released_one_is_at_once(queue: Queue) -> None:
    """Silence is what loses it."""
    a, b = queue.gateway(A), queue.gateway(B)
    s = await queue.taken(a)
    await queue.link.client.xclaim(KEYS.submit(), "gateways", A, 0, [s.entry], idle=50_000, justid=True)
    assert await a.renew([s]) == [True]
    assert await b.claim(40.0, 10) == []
    await a.release([s], 40.0)
    assert [x.entry for x in await b.claim(40.0, 10)] == [s.entry]


async def test_attempts_without_a_token_are_counted(queue: Queue) -> None:
    """A token starts the count anew."""
    a = queue.gateway(A)
    s = await queue.taken(a)
    seen = [await a.open(s), await a.open(s)]
    await a.write(s, [item(0, "a")])
    seen.append(await a.open(s))
    assert [p.tries for p in seen if p] == [2, 3, 1]


async def test_a_claim_takes_no_more_than_asked_for(queue: Queue) -> None:
    """However many wait."""
    a, b = queue.gateway(A), queue.gateway(B)
    for i in range(150):
        await queue.submit(f"job-{i}")
    await a.read(200, 1)
    assert len(await b.claim(0.0, 100)) == 100
    assert len({s.entry for s in await b.claim(0.0, 500)}) == 150


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=14
)
"""(gateway, 0 = opens, else writes; how many characters; from where: right, a repeat, a hole)."""


@given(STEPS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whoever_writes_whatever_the_result_has_no_hole_and_no_repeat(
    queue: Queue, steps: list[tuple[int, int, int, int]]
) -> None:
    """Two gateways that take turns, repeat themselves and are fenced: the result is a prefix of the text, always."""
    text = "the whole answer"
    await queue.link.client.flushall()
    gateways = [queue.gateway(A), queue.gateway(B)]
    await queue.submit()
    (s,) = await gateways[0].read(1, 1)
    owner, seen = -1, [0, 0]
    for who, action, count, variant in steps:
        if action == 0 or owner < 0:
            progress = await gateways[who].open(s)
            assert progress is not None
            owner, seen[who] = who, progress.tokens.get(0, 0)
            continue
        start = (seen[who], max(0, seen[who] - count), seen[who] + 1)[variant]
        piece = item(start, text[start : start + count])
        answer = await gateways[who].write(s, [piece])
        assert (answer == "lost") == (who != owner)
        if answer == "out":
            seen[who] = max(seen[who], start + len(piece.text))
        out = await queue.stream(KEYS.result("job"))
        assert "".join(v["text"] for _, v in out) == text[: seen[owner]]
        assert [int(v["offset"]) for _, v in out] == [0, *(int(i.partition("-")[0]) for i, _ in out)][: len(out)]


# --- requests that change their gateway ---------------------------------------------------------------------


@pytest.fixture
async def cell(queue: Queue) -> Cell:
    clock = SystemClock()
    leases = Leases(queue.link, KEYS, SeededRandomness(1))
    return Cell(leases, Roster(queue.link, KEYS, 1.0), RedisBus(queue.link, clock), KEYS, queue.link)


def of(gateway: Incarnation, request_id: RequestId) -> GenerateRequest:
    return replace(request(request_id), gateway=gateway)


async def test_a_running_request_goes_on_at_its_new_gateway(queue: Queue, cell: Cell) -> None:
    """The next epoch: workers told, what the old attempt says refused, the new stream begins with the log's length."""
    a, b = queue.gateway(A), queue.gateway(B)
    s = await queue.taken(a)
    assert await a.adopt(s, request()) == "unknown"
    fence = await dispatched(cell)
    gateway = Incarnation("gw1")
    r = fence.request_id
    assert await cell.leases.accept(fence, P, "prefill", 10.0) == "held"
    assert await cell.leases.emit(gateway, [(Tokens(r, 1, 0, 0, (7, 8)), A1)]) == [True]
    await cell.seen(KEYS.sched())
    await cell.seen(KEYS.work(D))
    (again,) = await b.claim(0.0, 10)
    await b.open(again)
    assert await b.adopt(again, of(B, r)) == "adopted"
    assert await cell.seen(KEYS.tokens(B)) == [EpochRaised(r, 2, 2)]
    assert await cell.seen(KEYS.sched()) == [Admitted(request_id=r, epoch=2)]
    for worker in (P, D):
        (told,) = await cell.seen(KEYS.control(worker))
        assert isinstance(told, Cancel)
        assert (told.request_id, told.epoch) == (r, 1)
    assert await cell.leases.emit(gateway, [(Tokens(r, 1, 0, 2, (9,)), A1)]) == [False]
    state = await cell.leases.load(r)
    assert state is not None
    assert (state.epoch, state.output, state.request.gateway) == (2, (7, 8), B)
    assert [q.request_id for q in await cell.leases.queued()] == [r]
    assert await queue.link.client.zcard(KEYS.leases()) == 0
    assert await cell.roster.held(P) == []


async def test_an_ended_request_tells_its_end_once_more(queue: Queue, cell: Cell) -> None:
    """The `Finished` that the dead gateway did not read comes to the new one; nobody works again."""
    a = queue.gateway(A)
    s = await queue.taken(a)
    fence = await dispatched(cell)
    finished = Finished(fence.request_id, 1, "length", 3, 16)
    assert await cell.leases.complete(fence, Incarnation("gw1"), finished, D, P)
    assert await a.adopt(s, of(A, fence.request_id)) == "adopted"
    assert await cell.seen(KEYS.tokens(A)) == [finished]
    assert await cell.leases.queued() == []


async def test_a_request_that_was_cancelled_with_its_gateway_lives_again(queue: Queue, cell: Cell) -> None:
    """A submission outlives its gateway, whatever was done about that gateway's requests; nothing of it expires."""
    a = queue.gateway(A)
    s = await queue.taken(a)
    fence = await dispatched(cell)
    assert await cell.leases.cancel(fence.request_id, "gateway gone")
    assert await a.adopt(s, of(A, fence.request_id)) == "adopted"
    state = await cell.leases.load(fence.request_id)
    assert state is not None
    assert state.epoch == 2
    assert await queue.link.client.pttl(KEYS.request(fence.request_id)) == -1


async def test_an_adoption_whose_answer_was_lost_is_made_once(queue: Queue, cell: Cell) -> None:
    """The same call again changes nothing; another call is another adoption."""
    a = queue.gateway(A)
    s = await queue.taken(a)
    fence = await dispatched(cell)
    real, calls = a._scripts.run, 0

    async def twice(name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        nonlocal calls
        calls += 1
        await real(name, keys, args)
        return await real(name, keys, args)

    a._scripts.run = twice  # type: ignore[method-assign]
    assert await a.adopt(s, of(A, fence.request_id)) == "adopted"
    assert calls == 1
    assert await cell.seen(KEYS.tokens(A)) == [EpochRaised(fence.request_id, 2, 0)]


async def test_an_opening_whose_answer_was_lost_counts_once(queue: Queue) -> None:
    """Else a bad network looks like a submission that breaks its gateway."""
    a = queue.gateway(A)
    await queue.submit()
    (s,) = await a.read(10, 1)
    real, losses = queue.link.client.evalsha, 3

    async def lossy(*args: Any) -> Any:
        nonlocal losses
        answer = await real(*args)
        losses -= 1
        if losses >= 0:
            raise RedisConnectionError("cut")
        return answer

    queue.link.client.evalsha = lossy
    first = await a.open(s)
    again = await a.open(s)
    assert first is not None
    assert again is not None
    assert [first.tries, again.tries] == [1, 2]
    assert await a.write(s, [item(0, "ab", 1), item(0, "x"), item(2, "c", 1)]) == "out"
    last = await queue.gateway(A).open(s)
    assert last is not None
    assert last.tries == 1
    assert await a.written(s) == {0: (ord("x"),), 1: tuple(map(ord, "abc"))}
