"""The source against readers that do not behave: what goes over the wire, frame by frame."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from services.transfer import Identity, Region, socket_source
from services.transfer.frames import MAX_FRAME_BYTES, frame, read_frame, source_messages
from services.transfer.wire import LinkLost, Wire, connect_tcp
from shared import capability
from shared.clock import ManualClock
from shared.config import TransferConfig
from shared.ids import AttemptId, BlockId, Incarnation, RequestId
from shared.messages import (
    PROTOCOL_VERSION,
    Data,
    Gone,
    Hello,
    HelloOk,
    Message,
    Read,
    Ready,
    Refused,
    Release,
    ReleaseAnswer,
    SourceMsg,
    Want,
)
from tests.transfer.world import ATTEMPT, FIRST, KEY, READER, SOURCE, World, make_world, until

pytestmark = pytest.mark.anyio

R = RequestId("r")


@pytest.fixture
async def world():
    async with make_world("tcp") as world:
        yield world


class RawReader:
    """Speaks frames, keeps no rules."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def say(self, *messages: Message) -> None:
        await self.wire.send_all(b"".join(map(frame, messages)))

    async def hear(self) -> SourceMsg:
        return await read_frame(self.wire, source_messages, patient=False)

    async def hear_bytes(self, num_bytes: int) -> bytes:
        return bytes(await self.wire.recv_exactly(num_bytes))

    async def ended(self) -> bool:
        """Whether the source hung up, with nothing more said."""
        try:
            await self.hear()
        except LinkLost:
            return True
        return False


@asynccontextmanager
async def raw(world: World, *, greet: bool = True, reader: Incarnation = READER) -> AsyncIterator[RawReader]:
    endpoint = world.source.endpoint()
    wire = await connect_tcp(endpoint.host, endpoint.port, 5, 5)
    try:
        client = RawReader(wire)
        if greet:
            await client.say(hello(reader=reader))
            assert await client.hear() == HelloOk(block_bytes=world.theirs.block_bytes, num_blocks=32)
        yield client
    finally:
        wire.close()


def hello(**changes) -> Hello:
    fields = {"protocol": PROTOCOL_VERSION, "reader": READER, "fingerprint": "pool-a", "source": SOURCE}
    return Hello(**(fields | changes))


def want(reader: Incarnation = READER) -> Want:
    token = capability.mint(KEY, R, 1, ATTEMPT, SOURCE, reader)
    return Want(request_id=R, epoch=1, attempt=ATTEMPT, capability=token)


def read(*ids: int) -> Read:
    return Read(request_id=R, epoch=1, block_ids=tuple(BlockId(i) for i in ids))


RELEASE = Release(request_id=R, epoch=1, attempt=ATTEMPT)
HELD = ReleaseAnswer(request_id=R, epoch=1, answer="held")
STALE = ReleaseAnswer(request_id=R, epoch=1, answer="stale")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack("<I", MAX_FRAME_BYTES + 1), id="oversized"),
        pytest.param(struct.pack("<I", 0xFFFFFFFF), id="huge"),
        pytest.param(struct.pack("<I", 4) + b"\xff\xff\xff\xff", id="garbage"),
        pytest.param(struct.pack("<I", 0), id="empty"),
        pytest.param(frame(HelloOk(block_bytes=1, num_blocks=1)), id="message of the other direction"),
        pytest.param(frame(hello()), id="second hello"),
        pytest.param(frame(Want(request_id=R, epoch=-1, attempt=ATTEMPT, capability=b"")), id="negative epoch"),
        pytest.param(frame(Read(request_id=RequestId("x" * 2000), epoch=1, block_ids=())), id="long id"),
    ],
)
async def test_bytes_that_are_no_message_end_the_connection(world: World, data: bytes):
    """Nonsense is counted and hung up on; the source serves others as before."""
    async with raw(world) as client:
        await client.wire.send_all(data)
        assert await client.ended()
    assert world.source.stats().malformed == 1
    world.announce(world.open(), 0, [1], FIRST)
    assert (await world.fetch([0])).num_blocks_read == 1


async def test_another_protocol_is_refused(world: World):
    """The refusal says which versions do not meet."""
    async with raw(world, greet=False) as client:
        await client.say(hello(protocol=PROTOCOL_VERSION + 1))
        answer = await client.hear()
        assert isinstance(answer, Refused)
        assert "protocol" in answer.reason
        assert await client.ended()


async def test_first_message_must_be_a_hello(world: World):
    """Asking before greeting gets nothing."""
    world.announce(world.open(), 0, [1], FIRST)
    async with raw(world, greet=False) as client:
        await client.say(want())
        assert isinstance(await client.hear(), Refused)
        assert await client.ended()


async def test_silent_connection_is_dropped():
    """Whoever connects and does not greet is not kept."""
    region = Region.create(4, 1000)
    config = TransferConfig(connect_timeout_s=0.02)
    source = socket_source(region, Identity(SOURCE, "pool-a"), KEY, config, ManualClock())
    async with anyio.create_task_group() as tg:
        await tg.start(source.serve)
        endpoint = source.endpoint()
        wire = await connect_tcp(endpoint.host, endpoint.port, 5, 5)
        assert await RawReader(wire).ended()
        wire.close()
        tg.cancel_scope.cancel()
    region.close()


async def test_read_without_want_is_refused(world: World):
    """Block ids alone open nothing: not the bytes of a request that this connection showed no capability for."""
    world.announce(world.open(), 0, [1], FIRST)
    async with raw(world) as client:
        await client.say(read(1))
        assert isinstance(await client.hear(), Refused)
        assert await client.ended()
    assert world.source.stats().bytes_sent == 0


async def test_stolen_want_is_refused(world: World):
    """A capability is bound to the reader that it was minted for."""
    world.announce(world.open(), 0, [1], FIRST)
    async with raw(world, reader=Incarnation("somebody else")) as client:
        await client.say(want())
        assert isinstance(await client.hear(), Refused)
        await client.say(want(reader=Incarnation("somebody else")))
        assert isinstance(await client.hear(), Refused)
    assert world.source.stats().refused == 2


@pytest.mark.parametrize("ids", [(2,), (1, 2), (31,), (32,), (-1,), (2**40,), ()])
async def test_only_announced_blocks_can_be_read(world: World, ids):
    """Any other id, in range or not, ends the connection without a byte."""
    world.announce(world.open(), 0, [1], FIRST)
    async with raw(world) as client:
        await client.say(want())
        assert isinstance(await client.hear(), Ready)
        await client.say(read(*ids))
        assert isinstance(await client.hear(), Refused)
        assert await client.ended()
    assert world.source.stats().bytes_sent == 0


async def test_many_reads_in_a_row_are_all_served(world: World):
    """More reads than the source queues: it takes them as it can, in order."""
    world.announce(world.open(), 0, [1, 2], FIRST)
    async with raw(world) as client:
        await client.say(want())
        await client.hear()
        await client.say(*[read(1 + i % 2) for i in range(1000)])
        for i in range(1000):
            assert await client.hear() == Data(request_id=R, epoch=1, num_bytes=1000)
            assert await client.hear_bytes(1000) == world.theirs.block(BlockId(1 + i % 2))


async def test_read_after_expiry_gets_no_bytes(world: World):
    """An expired offer answers `stale` to reads and to the release, each time."""
    offer = world.open()
    world.announce(offer, 0, [1], FIRST)
    async with raw(world) as client:
        await client.say(want())
        await client.hear()
        world.clock.advance(60.5)
        await client.say(read(1), RELEASE, RELEASE)
        # One is pushed at the end of the offer, three are answers.
        assert [await client.hear() for _ in range(4)] == [STALE] * 4
    assert await offer.settled() == "expired"
    assert world.source.stats().bytes_sent == 0


async def test_reading_renews_the_hold(world: World):
    """A reader that reads now and then keeps the offer alive."""
    offer = world.open()
    world.announce(offer, 0, [1], FIRST)
    async with raw(world) as client:
        await client.say(want())
        await client.hear()
        for _ in range(5):
            world.clock.advance(50)
            await client.say(read(1))
            assert isinstance(await client.hear(), Data)
            await client.hear_bytes(1000)
    assert offer.is_open


async def test_repeated_release_gets_the_same_answer(world: World):
    """Held stays held, over any connection; another attempt's release is stale."""
    world.announce(world.open(), 0, [1], FIRST)
    async with raw(world) as client:
        await client.say(want())
        await client.hear()
        await client.say(RELEASE, RELEASE)
        assert [await client.hear(), await client.hear()] == [HELD, HELD]
    world.clock.advance(1000)
    async with raw(world) as client:
        await client.say(RELEASE)
        assert await client.hear() == HELD
        await client.say(Release(request_id=R, epoch=1, attempt=AttemptId("attempt-0")), want())
        assert [await client.hear(), await client.hear()] == [STALE, STALE]
    assert world.source.stats().released == 1


async def test_release_of_the_unknown_is_stale(world: World):
    """A source that never heard of the request held nothing."""
    async with raw(world) as client:
        await client.say(RELEASE)
        assert await client.hear() == STALE


async def test_release_of_a_stranger_changes_nothing(world: World):
    """Only the reader of the offer can release it."""
    offer = world.open()
    async with raw(world, reader=Incarnation("somebody else")) as client:
        await client.say(RELEASE)
        assert await client.hear() == STALE
    assert offer.is_open


async def test_want_is_repeatable(world: World):
    """Each want replays what was announced, and later announcements come once."""
    offer = world.open()
    world.announce(offer, 0, [1])
    async with raw(world) as client:
        await client.say(want(), want())
        first, again = await client.hear(), await client.hear()
        assert first == again
        world.announce(offer, 1, [2], FIRST)
        ready = await client.hear()
        assert isinstance(ready, Ready)
        assert (ready.first_block, ready.last) == (1, FIRST)
        offer.withdraw("enough")
        assert await client.hear() == Gone(request_id=R, epoch=1, reason="enough")


async def test_waiting_want_is_answered_in_time(world: World):
    """A want whose task never arrives: signs of life first, then the end."""
    async with raw(world) as client:
        await client.say(want())
        await until(lambda: world.source.stats().waiting_wants == 1)
        world.clock.advance(61)
        assert await client.hear() == Gone(request_id=R, epoch=1, reason="never offered here")
    assert world.source.stats().waiting_wants == 0


async def test_bytes_stop_when_the_offer_ends():
    """A read under way turns into zeros once the worker may reuse the blocks; the frames stay in step."""
    async with make_world("tcp", block_bytes=1 << 20) as world:
        offer = world.open()
        world.announce(offer, 0, range(8))
        async with raw(world) as client:
            await client.say(want())
            await client.hear()
            await client.say(read(*range(8)))
            header = await client.hear()
            assert isinstance(header, Data)
            await until(lambda: world.source.stats().blocks_sent > 0)
            offer.withdraw("cancelled")
            assert await offer.settled() == "withdrawn"
            world.theirs.buffer[:] = b"\xaa" * len(world.theirs.buffer)  # reused at once
            data = await client.hear_bytes(header.num_bytes)
            assert data.endswith(bytes(1 << 20))
            assert b"\xaa" * 64 not in data
            assert await client.hear() == Gone(request_id=R, epoch=1, reason="cancelled")
        stats = world.source.stats()
        assert 0 < stats.bytes_sent < 8 << 20
        assert stats.bytes_filler > 0
