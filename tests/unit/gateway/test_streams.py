"""Token streams: order, fences, gaps, slow readers, and a drain that nobody can stop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.mailbox import Item, Mailbox
from services.gateway.streams import MAX_PARKED, RETRY_S, RequestStream, Streams
from shared.clock import ManualClock
from shared.errors import BusError, StreamGap
from shared.ids import RequestId
from shared.messages import EpochRaised, Finished, GatewayMsg, Tokens
from tests.unit.gateway.fakes import FakePort, Recorder

pytestmark = pytest.mark.anyio
R = RequestId("r")


def tokens(epoch: int, index: int, *token_ids: int, request_id: RequestId = R) -> Tokens:
    return Tokens(request_id, epoch, 0, index, token_ids)


def drain(mailbox: Mailbox) -> tuple[list[int], list[Finished]]:
    """What a mailbox holds, flat, without waiting."""
    items: list[Item] = mailbox._items
    ids = [token_id for item in items for token_id in item.token_ids]
    return ids, [item.finished for item in items if item.finished is not None]


def one_stream() -> tuple[RequestStream, Mailbox, Recorder]:
    mailbox, observer = Mailbox(), Recorder()
    return RequestStream(R, 0, mailbox, 0.0, observer), mailbox, observer


async def settle() -> None:
    """Let every task run until it waits."""
    await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def running(port: FakePort) -> AsyncIterator[tuple[Streams, ManualClock, Recorder]]:
    clock, observer = ManualClock(), Recorder()
    streams = Streams(port, clock, observer)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(streams.run)
        await settle()
        yield streams, clock, observer
        tasks.cancel_scope.cancel()


# --- accept: one request's order -------------------------------------------------------------------


def test_repeats_and_overlaps_are_dropped():
    """A token is taken once, however often its index arrives."""
    stream, mailbox, observer = one_stream()
    for event in (tokens(1, 0, 10), tokens(1, 0, 10), tokens(1, 0, 10, 11), tokens(1, 1, 11, 12)):
        stream.accept(event, 0.0)
    assert drain(mailbox)[0] == [10, 11, 12]
    assert observer.of("dropped") == ["repeat"]


def test_events_of_an_old_epoch_are_void():
    """After the epoch was raised, neither tokens nor the end of the old attempt count."""
    stream, mailbox, observer = one_stream()
    stream.accept(tokens(1, 0, 10), 0.0)
    stream.accept(EpochRaised(R, 2, 1), 0.0)
    stream.accept(tokens(1, 1, 99), 0.0)
    stream.accept(Finished(R, 1, "error"), 0.0)
    stream.accept(tokens(2, 1, 11), 0.0)
    assert drain(mailbox) == ([10, 11], [])
    assert stream.is_open
    assert observer.of("dropped") == ["stale", "stale"]


def test_there_is_exactly_one_end():
    """Whatever follows the first Finished changes nothing."""
    stream, mailbox, _ = one_stream()
    end = Finished(R, 1, "stop", 1)
    for event in (tokens(1, 0, 10), end, Finished(R, 2, "error"), tokens(2, 1, 11), end):
        stream.accept(event, 0.0)
    stream.fail("late")
    assert drain(mailbox) == ([10], [end])


@pytest.mark.parametrize(
    "event", [tokens(1, 2, 12), EpochRaised(R, 1, 2), Finished(R, 1, "length", 2)], ids=["tokens", "epoch", "end"]
)
def test_a_hole_raises_and_takes_nothing(event: GatewayMsg):
    """Tokens, an epoch marker and an end all show that something is missing before them."""
    stream, mailbox, _ = one_stream()
    stream.accept(tokens(1, 0, 10), 0.0)
    with pytest.raises(StreamGap) as gap:
        stream.accept(event, 0.0)
    assert (gap.value.want, gap.value.got) == (1, 2)
    assert drain(mailbox) == ([10], [])
    stream.accept_log([10, 11], 0.0)
    stream.accept(event, 0.0)
    assert drain(mailbox)[0][:2] == [10, 11]


def test_a_failed_request_may_end_without_all_its_tokens():
    """An error or a cancel is final even where its count is larger than what came."""
    stream, mailbox, _ = one_stream()
    stream.accept(Finished(R, 1, "error", 5), 0.0)
    assert [f.reason for f in drain(mailbox)[1]] == ["error"]


LOG = list(range(100, 112))


@st.composite
def histories(draw: st.DrawFn) -> list[GatewayMsg]:
    """Events of several attempts, each of which resumes the same text somewhere at or before the last
    one's end; cut at random, repeated at random, with holes. The last event is the true end."""
    events: list[GatewayMsg] = []
    done = 0
    num_epochs = draw(st.integers(1, 3))
    for epoch in range(1, num_epochs + 1):
        if epoch > 1:
            events.append(EpochRaised(R, epoch, done))
        end = len(LOG) if epoch == num_epochs else draw(st.integers(done, len(LOG)))
        at = draw(st.integers(0, done))
        while at < end:
            size = draw(st.integers(1, 4))
            event = Tokens(R, epoch, 0, at, tuple(LOG[at : min(at + size, end)]))
            events += [event] * draw(st.sampled_from([0, 1, 1, 1, 2]))
            at += size
        done = max(done, end)
        stale = Tokens(R, max(1, epoch - 1), 0, at, (999,))
        events += [stale] if epoch > 1 and draw(st.booleans()) else []
    events.append(Finished(R, num_epochs, "length", len(LOG)))
    return events


@given(histories())
def test_any_history_gives_the_text_once_and_in_order(history: list[GatewayMsg]):
    """With the log to repair holes from, the reader gets exactly the log and one end."""
    stream, mailbox, _ = one_stream()
    for event in history:
        try:
            stream.accept(event, 0.0)
        except StreamGap as gap:
            stream.accept_log(LOG[: gap.got], 0.0)
            stream.accept(event, 0.0)
    ids, ends = drain(mailbox)
    assert ids == LOG
    assert ends == [history[-1]]


# --- Streams: the drain -----------------------------------------------------------------------------


async def test_a_gap_is_repaired_from_the_log_while_events_go_on():
    """Events behind the gap wait for the repair; the log is read once."""
    port = FakePort(logs={"r": (10, 11, 12)})
    async with running(port) as (streams, _, observer):
        mailbox = Mailbox()
        streams.open(R, 0, mailbox, 0.0)
        port.emit(tokens(1, 0, 10), tokens(1, 2, 12), tokens(1, 3, 13))
        port.emit(tokens(1, 4, 14), Finished(R, 1, "length", 5))
        await settle()
        ids, ends = drain(mailbox)
    assert ids == [10, 11, 12, 13, 14]
    assert [end.reason for end in ends] == ["length"]
    assert port.log_reads == 1
    assert observer.of("gap_repaired") == [2]


@pytest.mark.parametrize("broken", [False, True], ids=["log too short", "bus away"])
async def test_a_gap_that_cannot_be_repaired_fails_only_its_request(broken: bool):
    """The other request never notices."""
    port, other = FakePort(broken=broken), RequestId("other")
    async with running(port) as (streams, _, _observer):
        mine, theirs = Mailbox(), Mailbox()
        streams.open(R, 0, mine, 0.0)
        streams.open(other, 0, theirs, 0.0)
        port.emit(tokens(1, 5, 15), tokens(1, 0, 20, request_id=other))
        port.emit(tokens(1, 1, 21, request_id=other), Finished(other, 1, "stop", 2))
        await settle()
        assert [end.reason for end in drain(mine)[1]] == ["error"]
        assert drain(theirs)[0] == [20, 21]
        assert [end.reason for end in drain(theirs)[1]] == ["stop"]


async def test_events_parked_during_a_repair_are_bounded():
    """A repair that hangs costs its own request, not the gateway's memory."""

    class Hanging(FakePort):
        async def token_log(self, request_id: RequestId, choice: int) -> tuple[int, ...]:
            await anyio.sleep_forever()
            raise AssertionError

    port = Hanging()
    async with running(port) as (streams, _, _observer):
        mailbox = Mailbox()
        stream = streams.open(R, 0, mailbox, 0.0)
        port.emit(*(tokens(1, 1 + i, i) for i in range(MAX_PARKED + 10)))
        await settle()
        assert stream.parked is not None
        assert len(stream.parked) <= MAX_PARKED
        assert [end.reason for end in drain(mailbox)[1]] == ["error"]


async def test_a_bad_event_fails_its_request_and_the_drain_goes_on():
    """Nonsense from a worker is quarantined."""
    port, other = FakePort(), RequestId("other")
    nonsense: Any = Tokens(R, 1, 0, None, (1,))  # type: ignore[arg-type]
    async with running(port) as (streams, _, _observer):
        mine, theirs = Mailbox(), Mailbox()
        streams.open(R, 0, mine, 0.0)
        streams.open(other, 0, theirs, 0.0)
        port.emit(nonsense, tokens(1, 0, 20, request_id=other), tokens(1, 0, 5, request_id=RequestId("unknown")))
        await settle()
        assert [end.reason for end in drain(mine)[1]] == ["error"]
        assert drain(theirs)[0] == [20]


@pytest.mark.parametrize("error", [BusError("away"), ValueError("a bug")], ids=lambda e: type(e).__name__)
async def test_a_lost_bus_fails_the_open_requests_and_the_drain_comes_back(error: Exception):
    """Nobody waits for ever; what is asked later is served."""

    class Flaky(FakePort):
        failures = 1

        async def next_events(self) -> list[GatewayMsg]:
            if self.failures and self.admitted:
                self.failures = 0
                raise error
            return await super().next_events()

    port = Flaky()
    async with running(port) as (streams, clock, _observer):
        first, second = Mailbox(), Mailbox()
        streams.open(R, 0, first, 0.0)
        port.admitted.append(None)  # type: ignore[arg-type]
        port.emit(tokens(1, 0, 1))
        await settle()
        assert [end.reason for end in drain(first)[1]] == ["error"]
        streams.open(RequestId("s"), 0, second, 0.0)
        port.emit(tokens(1, 0, 7, request_id=RequestId("s")))
        clock.advance(1.0)
        await settle()
        assert drain(second)[0] == [7]


async def test_closing_cancels_only_what_still_runs():
    """A request that ended upstream is not cancelled; one that runs is, once."""
    port = FakePort()
    async with running(port) as (streams, _, _observer):
        ended = streams.open(R, 0, Mailbox(), 0.0)
        open_ = streams.open(RequestId("open"), 0, Mailbox(), 0.0)
        port.emit(Finished(R, 1, "stop"))
        await settle()
        for stream in (ended, open_, open_):
            streams.close(stream, cancel="gone")
        await settle()
        assert port.cancelled == [("open", "gone")]
        assert len(streams) == 0


async def test_latencies_are_those_of_arrival():
    """TTFT from the request's arrival, gaps between events, TPOT over all tokens after the first."""
    port = FakePort()
    async with running(port) as (streams, clock, observer):
        stream = streams.open(R, 0, Mailbox(), 0.0)
        for at, event in ((2.0, tokens(1, 0, 1)), (0.5, tokens(1, 1, 2, 3)), (1.5, tokens(1, 3, 4))):
            clock.advance(at)
            port.emit(event)
            await settle()
    assert observer.of("first_token") == [2.0]
    assert observer.of("more_tokens") == [(0.5, 2), (1.5, 1)]
    assert stream.timing.tpot_s == pytest.approx(2.0 / 3)


# --- Mailbox: a slow client -------------------------------------------------------------------------


async def test_a_slow_reader_gets_every_token_in_few_items():
    """The box holds a bounded number of items; tokens are merged, never lost or reordered."""
    mailbox = Mailbox(max_items=8)
    for i in range(1000):
        mailbox.put(i % 2, [i])
    mailbox.finish(0, Finished(R, 1, "length"))
    assert len(mailbox) <= 8 + 2 + 1
    items = await mailbox.take()
    for choice in (0, 1):
        ids = [token_id for item in items if item.choice == choice for token_id in item.token_ids]
        assert ids == list(range(choice, 1000, 2))


async def test_a_reader_that_keeps_up_gets_every_event_apart():
    """One item for each event, so that one token makes one chunk."""
    mailbox = Mailbox()
    mailbox.put(0, [1])
    mailbox.put(0, [2])
    assert [item.token_ids for item in await mailbox.take()] == [[1], [2]]
    mailbox.put(0, [3])
    assert [item.token_ids for item in await mailbox.take()] == [[3]]


async def test_a_cancel_that_redis_does_not_take_is_tried_until_it_does():
    """A client that leaves while Redis is away: its work must not run to the end."""
    port = FakePort()
    async with running(port) as (streams, clock, _observer):
        stream = streams.open(R, 0, Mailbox(), 0.0)
        port.broken = True
        streams.close(stream, cancel="gone")
        for _ in range(3):
            await settle()
            assert port.cancelled == []
            clock.advance(RETRY_S)
        port.broken = False
        clock.advance(RETRY_S)
        await settle()
        assert port.cancelled == [("r", "gone")]
