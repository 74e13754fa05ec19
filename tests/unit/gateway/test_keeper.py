"""The keeper: greets, finds what Redis has lost, and does nothing to what is well."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

from services.gateway.keeper import Keeper
from services.gateway.mailbox import Mailbox
from services.gateway.ports import Admission, NullObserver
from services.gateway.streams import RequestStream, Streams
from shared.clock import ManualClock
from shared.config import LeaseConfig
from shared.hashing import chain_root
from shared.ids import Incarnation, RequestId
from shared.messages import EpochRaised, Finished, GenerateRequest, SamplingParams, Tokens
from tests.unit.gateway.fakes import FakePort

pytestmark = pytest.mark.anyio
LEASE = LeaseConfig()
QUEUE_TIMEOUT_S = 100.0
R = RequestId("r")


@dataclass
class FakeRegistry:
    """What Redis says, as the test sets it."""

    unknown: bool = False
    state: Literal["live", "ended", "lost"] = "live"
    greetings: int = 0
    waits: bool = False
    readmitted: list[tuple[RequestId, int, tuple[int, ...]]] = field(default_factory=list)

    async def greet(self) -> bool:
        self.greetings += 1
        return self.unknown

    async def states(self, request_ids: Sequence[RequestId]) -> list[Literal["live", "ended", "lost"]]:
        return [self.state for _ in request_ids]

    async def queued(self, request_ids: Sequence[RequestId]) -> list[bool]:
        return [self.waits for _ in request_ids]

    async def readmit(self, request: GenerateRequest, epoch: int, output: Sequence[int]) -> Admission:
        self.readmitted.append((request.request_id, epoch, tuple(output)))
        return "admitted"


@dataclass
class Desk:
    registry: FakeRegistry
    streams: Streams
    stream: RequestStream
    keeper: Keeper
    mailbox: Mailbox
    clock: ManualClock


@pytest.fixture
def desk() -> Desk:
    """One admitted request that has two tokens, at epoch 3."""
    clock, registry, mailbox = ManualClock(50.0), FakeRegistry(), Mailbox()
    streams = Streams(FakePort(), clock, NullObserver())
    stream = streams.open(R, 0, mailbox, 0.0)
    stream.request = GenerateRequest(
        request_id=R,
        gateway=Incarnation("g"),
        token_ids=(1,),
        root_hash=chain_root(),
        block_hashes=(),
        sampling=SamplingParams(max_tokens=9),
    )
    stream.accept(EpochRaised(R, 3, 0), 0.0)
    stream.accept(Tokens(R, 3, 0, 0, (7, 8)), 0.0)
    return Desk(registry, streams, stream, Keeper(registry, streams, clock, LEASE, QUEUE_TIMEOUT_S), mailbox, clock)


async def look_later(desk: Desk) -> None:
    desk.clock.advance(LEASE.lease_s)
    await desk.keeper.look()


async def test_a_lost_request_is_admitted_again_with_its_tokens(desk: Desk) -> None:
    """Under the same id, one epoch above all that was heard."""
    desk.registry.state = "lost"
    await look_later(desk)
    assert desk.registry.readmitted == [(R, 4, (7, 8))]
    desk.stream.accept(Tokens(R, 3, 0, 2, (99,)), 0.0)
    assert desk.stream.is_open
    assert desk.stream.token_ids == [7, 8], "whoever worked on it before is not believed"


async def test_a_gateway_that_redis_forgot_compares_at_once(desk: Desk) -> None:
    """An empty Redis took over: nobody waits a lease period for it."""
    desk.registry.state, desk.registry.unknown = "lost", True
    await desk.keeper.look()
    assert len(desk.registry.readmitted) == 1


async def test_what_is_well_is_left_alone(desk: Desk) -> None:
    """Greetings go on; nothing is compared more than once per lease period."""
    await desk.keeper.look()
    await look_later(desk)
    assert desk.registry.greetings == 2
    assert not desk.registry.readmitted
    assert desk.stream.is_open


async def test_a_request_whose_end_was_lost_fails(desk: Desk) -> None:
    """Ended by Redis' word at two looks, and still open here: the client gets an error, not silence."""
    desk.registry.state = "ended"
    await look_later(desk)
    assert desk.stream.is_open, "its last events may be under way"
    await look_later(desk)
    assert not desk.stream.is_open
    items = await desk.mailbox.take()
    assert items[-1].finished is not None
    assert items[-1].finished.reason == "error"


async def test_a_request_that_is_not_admitted_yet_is_nobodys_loss(desk: Desk) -> None:
    """Its admission is under way: Redis need not know it."""
    desk.stream.request = None
    desk.registry.state = "lost"
    await look_later(desk)
    assert not desk.registry.readmitted


async def test_an_ended_stream_is_not_readmitted(desk: Desk) -> None:
    """`Finished` came between the question and the answer."""
    desk.registry.state = "lost"
    desk.stream.accept(Finished(R, 3, "stop", 2), 0.0)
    await look_later(desk)
    assert not desk.registry.readmitted


@pytest.mark.parametrize("case", ["waits", "runs", "has tokens", "durable", "in time"])
async def test_a_request_that_waited_too_long_for_a_worker_is_refused(desk: Desk, case: str) -> None:
    """Only while it waits: not one that is being computed, that has tokens, or that may wait for ever."""
    now = desk.clock.now()
    stream = desk.streams.open(RequestId("late"), 0, desk.mailbox, now)
    stream.request = desk.stream.request
    desk.registry.waits = case != "runs"
    stream.durable = case == "durable"
    if case == "has tokens":
        stream.accept(Tokens(RequestId("late"), 1, 0, 0, (7,)), now)
    desk.clock.advance(QUEUE_TIMEOUT_S + (-1 if case == "in time" else 1))
    await desk.keeper.look()
    assert stream.is_open == (case != "waits")
    if case == "waits":
        finished = (await desk.mailbox.take())[-1].finished
        assert finished is not None
        assert (finished.reason, finished.error) == ("cancelled", "queue_timeout")
        assert not stream.ended_upstream, "so that closing it cancels it in the queue"
