"""What goes wrong by name: injected faults of the fake wire, broken peers of the real one, fall-back of transports."""

import socket
import struct
from pathlib import Path

import anyio
import msgspec
import pytest

from services.transfer import Identity, Region, socket_reader, socket_source
from services.transfer.fake import Faults
from services.transfer.frames import frame, read_frame, reader_messages
from services.transfer.wire import Wire, listen_tcp, listen_unix
from shared import capability
from shared.clock import ManualClock, SystemClock
from shared.config import TransferConfig
from shared.errors import DigestMismatch, TransferError
from shared.hashing import block_digest
from shared.ids import BlockId, RequestId, WorkerId
from shared.messages import Data, Endpoint, HelloOk, Message, Ready, SourceRef
from shared.offload import ThreadOffload
from tests.transfer.test_conformance import collect
from tests.transfer.world import ATTEMPT, FIRST, KEY, READER, SOURCE, fill, make_world, until

pytestmark = pytest.mark.anyio


async def test_flipped_byte_is_read_again():
    """A fault of the wire costs one more read of that block, and no more."""
    async with make_world("fake", faults=Faults(flip_blocks=frozenset({2}))) as world:
        world.announce(world.open(), 0, range(5), FIRST)
        assert (await world.fetch(range(5))).num_blocks_read == 5
        assert all(world.same(b, b) for b in range(5))
        stats = world.reader.stats()
        assert (stats.digest_failures, stats.retries, stats.blocks_read) == (1, 1, 6)


async def test_block_that_stays_bad_is_an_error():
    """Bad on the second try as well: give up."""
    async with make_world("fake", faults=Faults(flip_blocks=frozenset({1, 3}))) as world:
        world.announce(world.open(), 0, range(3), FIRST)
        with pytest.raises(DigestMismatch):
            await world.fetch(range(3))


async def test_connection_dropped_inside_a_block():
    """Half a block arrived: it is read anew over the next connection."""
    async with make_world("fake", faults=Faults(drop_at_blocks=frozenset({3}))) as world:
        world.announce(world.open(), 0, range(6), FIRST)
        assert (await world.fetch(range(6))).num_blocks_read == 6
        assert all(world.same(b, b) for b in range(6))
        assert world.reader.stats().retries == 1


async def test_lost_release_is_no_held():
    """Without an answer to the release the bytes must not be used, however good they look."""
    async with make_world("fake", faults=Faults(lose_releases=True)) as world:
        results: list = []
        offer = world.open()
        world.announce(offer, 0, [1], FIRST)
        world.tg.start_soon(collect, results, world.fetch([0]))
        await until(lambda: world.reader.stats().blocks_read == 1)
        world.source._book.hold_s = 1e9
        world.clock.advance(501)
        await until(lambda: bool(results))
        assert type(results[0]) is TransferError
        assert offer.is_open


async def test_slow_wire_runs_on_the_clock():
    """Delays of the fake pass only as the clock does."""
    async with make_world("fake", faults=Faults(delay_s=10.0)) as world:
        results: list = []
        world.announce(world.open(), 0, range(3), FIRST)
        world.tg.start_soon(collect, results, world.fetch(range(3)))
        for num_landed in range(3):
            await until(lambda: len(world.clock._sleepers) == 3)
            assert world.network is not None
            assert world.network.num_moved == num_landed
            assert not results
            world.clock.advance(10.0)
            await until(lambda n=num_landed: world.network.num_moved == n + 1)
        await until(lambda: bool(results))
        assert results[0].num_blocks_read == 3


# --- broken sources ---------------------------------------------------------------------------------


class BrokenSource:
    """Listens on tcp, greets properly, announces one block, answers the read with what the test gives it."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = listen_tcp("127.0.0.1", 0)
        self.num_connections = 0
        self._wires: list[Wire] = []

    def ref(self) -> SourceRef:
        token = capability.mint(KEY, RequestId("r"), 1, ATTEMPT, SOURCE, READER)
        endpoint = Endpoint(host="127.0.0.1", port=self._listener.port)
        return SourceRef(worker_id=WorkerId("p"), incarnation=SOURCE, endpoints=(endpoint,), capability=token)

    async def run(self) -> None:
        while True:
            wire = await self._listener.accept(5, 5)
            self._wires.append(wire)
            self.num_connections += 1
            await self._say(wire, HelloOk(block_bytes=1000, num_blocks=4))
            ids, digests = (BlockId(1),), (block_digest(bytes(1000)),)
            ready = Ready(request_id=RequestId("r"), epoch=1, first_block=0, block_ids=ids, digests=digests, last=FIRST)
            await self._say(wire, ready)
            await read_frame(wire, reader_messages, patient=False)  # the read
            await wire.send_all(self._answer)

    async def _say(self, wire: Wire, message: Message) -> None:
        await read_frame(wire, reader_messages, patient=False)
        await wire.send_all(frame(message))

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        self._listener.close()


def data(num_bytes: int) -> bytes:
    return frame(Data(request_id=RequestId("r"), epoch=1, num_bytes=num_bytes))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(data(1001) + bytes(1001), id="too many bytes"),
        pytest.param(data(0), id="no bytes"),
        pytest.param(frame(Data(request_id=RequestId("q"), epoch=1, num_bytes=1000)), id="bytes of another request"),
        pytest.param(data(1000) + bytes(400), id="falls silent half-way"),
        pytest.param(struct.pack("<I", 1 << 31), id="oversized frame"),
        pytest.param(struct.pack("<I", 3) + b"\xc1\xc1\xc1", id="no message"),
        pytest.param(frame(HelloOk(block_bytes=1000, num_blocks=4)), id="second hello"),
        pytest.param(struct.pack("<I", 100) + b"\x81", id="half a frame"),
    ],
)
async def test_source_that_talks_nonsense_is_left(answer: bytes):
    """The reader hangs up, tries once more, then fails; its memory is its own again."""
    region = Region.create(4, 1000)
    config = TransferConfig(transports=("tcp",), idle_timeout_s=0.05)
    reader = socket_reader(region, Identity(READER, "pool-a"), config, ManualClock(), ThreadOffload(1))
    source = BrokenSource(answer)
    async with anyio.create_task_group() as tg:
        tg.start_soon(source.run)
        await tg.start(reader.serve)
        with pytest.raises(TransferError):
            await reader.fetch(source.ref(), RequestId("r"), 1, ATTEMPT, [BlockId(0)])
        assert source.num_connections == 2
        assert reader.stats().blocks_read == 0
        tg.cancel_scope.cancel()
    source.close()
    region.close()


@pytest.mark.parametrize(
    "ready",
    [
        pytest.param({"block_ids": (BlockId(4),)}, id="id out of range"),
        pytest.param({"block_ids": (BlockId(-1),)}, id="negative id"),
        pytest.param({"first_block": 1}, id="beyond the request"),
        pytest.param({"first_block": -1}, id="before the request"),
        pytest.param({"digests": ()}, id="no digest"),
        pytest.param({"block_ids": (), "digests": ()}, id="ends early"),
    ],
)
async def test_impossible_announcement_is_an_error(ready: dict):
    """What cannot be is not followed: not out of the source's memory, not out of the request."""
    async with make_world("shm", num_blocks=4) as world:
        results: list = []
        offer = world.open()
        world.tg.start_soon(collect, results, world.fetch([0]))
        await until(lambda: world.source.stats().connections == 1 and offer._sink is not None)
        fields = {
            "request_id": RequestId("r"),
            "epoch": 1,
            "first_block": 0,
            "block_ids": (BlockId(1),),
            "digests": (block_digest(b""),),
            "last": FIRST,
        }
        offer._post(Ready(**(fields | ready)))
        await until(lambda: bool(results))
        assert isinstance(results[0], TransferError)
        assert world.reader.stats().blocks_read == 0


# --- choice of transport ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "transport"),
    [
        ({}, "shm"),
        ({"host_id": "another machine"}, "tcp"),
        ({"host_id": ""}, "tcp"),
        ({"shm_path": ""}, "tcp"),
        ({"shm_path": "/nonexistent/kv.sock"}, "tcp"),
    ],
)
async def test_shared_memory_where_it_works_else_tcp(changes: dict, transport: str):
    """The configured order, as far as the source can be reached that way."""
    theirs, ours = Region.create(4, 1000), Region.create(4, 1000)
    fill(theirs, seed=3)
    config, clock = TransferConfig(), SystemClock()
    source = socket_source(theirs, Identity(SOURCE, "f"), KEY, config, clock)
    reader = socket_reader(ours, Identity(READER, "f"), config, clock, ThreadOffload(1))
    token = capability.mint(KEY, RequestId("r"), 1, ATTEMPT, SOURCE, READER)
    async with anyio.create_task_group() as tg:
        await tg.start(source.serve)
        await tg.start(reader.serve)
        endpoint = msgspec.structs.replace(source.endpoint(), **changes)
        ref = SourceRef(worker_id=WorkerId("p"), incarnation=SOURCE, endpoints=(endpoint,), capability=token)
        offer = source.open(RequestId("r"), 1, ATTEMPT, READER)
        offer.announce(0, [BlockId(2)], [block_digest(theirs.block(BlockId(2)))], FIRST)
        await reader.fetch(ref, RequestId("r"), 1, ATTEMPT, [BlockId(1)])
        stats = reader.stats()
        tg.cancel_scope.cancel()
    assert ours.block(BlockId(1)) == theirs.block(BlockId(2))
    assert (stats.links_shm, stats.links_tcp) == ((1, 0) if transport == "shm" else (0, 1))
    theirs.close()
    ours.close()


async def test_socket_is_private_and_goes_away(tmp_path: Path):
    """Only this user may ask for the memory file, and the path is gone after the source."""
    region = Region.create(1, 10)
    identity = Identity(SOURCE, "f")
    source = socket_source(region, identity, KEY, TransferConfig(), SystemClock(), run_dir=str(tmp_path))
    async with anyio.create_task_group() as tg:
        await tg.start(source.serve)
        path = anyio.Path(source.endpoint().shm_path)
        assert Path(path.parent) == tmp_path
        assert (await path.stat()).st_mode & 0o777 == 0o600
        tg.cancel_scope.cancel()
    assert not await path.exists()
    region.close()


async def test_folder_that_is_too_long_means_no_shared_memory(tmp_path: Path):
    """A path that no unix socket can have is reported, and tcp serves."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.raises(OSError, match="too long"):
        listen_unix(str(folder / "kv.sock"))
    region = Region.create(1, 10)
    source = socket_source(region, Identity(SOURCE, "f"), KEY, TransferConfig(), SystemClock(), run_dir=str(folder))
    async with anyio.create_task_group() as tg:
        await tg.start(source.serve)
        assert source.endpoint().shm_path == ""
        tg.cancel_scope.cancel()
    region.close()


async def test_busy_port_is_an_error():
    """A second source on the same port does not start."""
    region = Region.create(1, 10)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        source = socket_source(region, Identity(SOURCE, "f"), KEY, TransferConfig(), SystemClock(), port=port)
        with pytest.raises(OSError, match="in use"):
            await source.serve()
    region.close()
