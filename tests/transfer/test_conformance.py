"""What every transport must do alike."""

import anyio
import pytest

from shared.errors import DigestMismatch, TransferError, TransferRefused, TransferStale
from shared.hashing import block_digest
from shared.ids import AttemptId, BlockId, Incarnation, RequestId
from shared.messages import FirstToken
from tests.transfer.world import FIRST, READER, World, make_world, until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["fake", "tcp", "shm"])
def kind(request):
    return request.param


@pytest.fixture
async def world(kind):
    async with make_world(kind) as world:
        yield world


async def collect(results: list, call) -> None:
    """Run a fetch as a task; keep what it returned or raised."""
    try:
        results.append(await call)
    except TransferError as exc:
        results.append(exc)


async def test_scattered_blocks_arrive_byte_for_byte(world: World):
    """Blocks land where the reader wants them, whatever the ids at both ends."""
    offer = world.open()
    theirs, ours = [7, 0, 31, 12, 3], [2, 30, 5, 11, 0]
    world.announce(offer, 0, theirs, FIRST)
    fetched = await world.fetch(ours)
    assert all(world.same(t, o) for t, o in zip(theirs, ours, strict=True))
    assert (fetched.first, fetched.num_blocks_read, fetched.num_bytes) == (FIRST, 5, 5000)
    assert await offer.settled() == "released"
    untouched = set(range(32)) - set(ours)
    assert all(bytes(world.ours.block(BlockId(b))) == bytes(1000) for b in untouched)


async def test_blocks_that_the_reader_has_are_not_read(world: World):
    """Skipped blocks cost no bytes, and nothing else moves."""
    offer = world.open()
    world.announce(offer, 0, [1, 2, 3, 4], FIRST)
    fetched = await world.fetch([None, None, 8, 9])
    assert (fetched.num_blocks_read, fetched.num_bytes) == (2, 2000)
    assert world.same(3, 8)
    assert world.same(4, 9)
    stats = world.reader.stats()
    assert (stats.blocks_read, stats.bytes_read) == (2, 2000)


async def test_all_blocks_here_already_still_brings_the_first_token(world: World):
    """With nothing to read, the fetch waits for the last announcement and releases."""
    offer = world.open()
    world.announce(offer, 0, [1, 2], FIRST)
    fetched = await world.fetch([None, None])
    assert (fetched.first, fetched.num_bytes) == (FIRST, 0)
    assert await offer.settled() == "released"


async def test_reads_follow_the_announcements(world: World):
    """Blocks announced early are here before the last chunk is computed."""
    results: list = []
    world.tg.start_soon(collect, results, world.fetch([4, 5, 6]))
    await until(lambda: world.source.stats().waiting_wants == 1)
    offer = world.open()
    world.announce(offer, 0, [9])
    await until(lambda: world.reader.stats().blocks_read == 1)
    assert world.same(9, 4)
    assert not results
    world.announce(offer, 1, [10, 11], FIRST)
    await until(lambda: bool(results))
    assert results[0].num_blocks_read == 3
    assert world.same(11, 6)


async def test_last_token_may_come_without_blocks(world: World):
    """The final announcement may carry only the first token."""
    offer = world.open()
    world.announce(offer, 0, [3])
    world.announce(offer, 1, [], FIRST)
    assert (await world.fetch([0])).first == FIRST


async def test_several_requests_share_a_link(world: World):
    """Requests under way at once get their own blocks, and one connection carries them."""
    results: list = []
    offers = [world.open(f"r{i}") for i in range(8)]
    for i in range(8):
        world.tg.start_soon(collect, results, world.fetch([2 * i, 2 * i + 1], f"r{i}"))
    for i in reversed(range(8)):
        last = FirstToken(index=0, token_id=i)
        world.announce(offers[i], 0, [31 - 2 * i, 30 - 2 * i], last)
    await until(lambda: len(results) == 8)
    assert sorted(r.first.token_id for r in results) == list(range(8))
    assert all(world.same(31 - b, b) for b in range(16))
    assert world.source.stats().connections == 1


async def test_a_tight_budget_only_slows(kind):
    """With room for one block under way, many requests finish all the same."""
    async with make_world(kind, max_inflight_bytes=1500) as world:
        results: list = []
        for i in range(6):
            world.announce(world.open(f"r{i}"), 0, range(5 * i, 5 * i + 5), FIRST)
        for i in range(6):
            world.tg.start_soon(collect, results, world.fetch(range(5 * i, 5 * i + 5), f"r{i}"))
        await until(lambda: len(results) == 6)
        assert [r.num_blocks_read for r in results] == [5] * 6
        assert all(world.same(b, b) for b in range(30))


async def test_cancelled_fetch_leaves_its_destination_alone(kind):
    """Once a cancelled fetch has ended, its blocks can be reused; the link goes on to serve others."""
    async with make_world(kind, num_blocks=24, block_bytes=1 << 20) as world:
        offer = world.open("a")
        world.announce(offer, 0, range(20), FIRST)
        with anyio.CancelScope() as scope:

            async def cancel_midway():
                await until(lambda: world.landed(0, 0))
                scope.cancel()

            world.tg.start_soon(cancel_midway)
            await world.fetch(range(20), "a")
        assert scope.cancelled_caught
        world.ours.buffer[: 20 << 20] = b"\xee" * (20 << 20)
        assert await offer.settled() == "released"
        world.announce(world.open("b"), 0, [20, 21], FIRST)
        assert (await world.fetch([22, 23], "b")).num_blocks_read == 2
        assert world.same(20, 22)
        assert bytes(world.ours.buffer[: 20 << 20]) == b"\xee" * (20 << 20)
        assert world.source.stats().connections == 1


async def test_cancel_before_anything_was_announced(world: World):
    """A reader that gives up while it waits leaves no trace at the source."""
    with anyio.CancelScope() as scope:

        async def cancel_once_waiting():
            await until(lambda: world.source.stats().waiting_wants == 1)
            scope.cancel()

        world.tg.start_soon(cancel_once_waiting)
        await world.fetch([0])
    await until(lambda: world.source.stats().waiting_wants == 0)
    assert world.reader.stats().open_fetches == 0


async def test_withdrawn_offer_ends_the_fetch(world: World):
    """The reader learns at once, with the reason."""
    results: list = []
    offer = world.open()
    world.announce(offer, 0, [1])
    world.tg.start_soon(collect, results, world.fetch([0, 1]))
    await until(lambda: world.reader.stats().blocks_read == 1)
    offer.withdraw("request was cancelled")
    assert await offer.settled() == "withdrawn"
    await until(lambda: bool(results))
    assert isinstance(results[0], TransferRefused)
    assert "request was cancelled" in str(results[0])


async def test_want_after_withdrawal_is_told_so(world: World):
    """The end of an offer is remembered for a reader that comes late."""
    world.open().withdraw("lost its lease")
    with pytest.raises(TransferRefused, match="lost its lease"):
        await world.fetch([0])


async def test_expired_offer_is_stale(world: World):
    """No sign of life for the hold time: the worker may unpin, and the reader must not use what it read."""
    results: list = []
    offer = world.open()
    world.announce(offer, 0, [1])
    world.tg.start_soon(collect, results, world.fetch([0, 1]))
    await until(lambda: world.reader.stats().blocks_read == 1)
    world.clock.advance(61)
    assert await offer.settled() == "expired"
    await until(lambda: bool(results))
    assert isinstance(results[0], TransferStale)
    with pytest.raises(TransferStale):
        await world.fetch([0, 1])
    assert world.source.stats().expired == 1


async def test_kept_offer_does_not_expire(world: World):
    """While the worker keeps it, a slow prefill loses nothing: neither the hold nor the reader's patience."""
    results: list = []
    offer = world.open()
    world.tg.start_soon(collect, results, world.fetch([0]))
    await until(lambda: world.source.stats().connections == 1)
    for _ in range(20):
        world.clock.advance(50)
        await until(lambda: world.reader.stats().open_fetches == 1)
        offer.keep()
        await settle()
    world.announce(offer, 0, [1], FIRST)
    await until(lambda: bool(results))
    assert results[0].num_blocks_read == 1


async def settle() -> None:
    """Some turns of the loop, so that what was sent arrives."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


async def test_silent_source_fails_the_fetch(world: World):
    """An offer that is neither kept nor ended makes the reader give up after the idle time."""
    results: list = []
    offer = world.open()
    world.announce(offer, 0, [1])
    world.tg.start_soon(collect, results, world.fetch([0, 1]))
    await until(lambda: world.reader.stats().blocks_read == 1)
    world.source._book.hold_s = 1e9
    world.clock.advance(501)
    await until(lambda: bool(results))
    assert type(results[0]) is TransferError
    assert world.reader.stats().timeouts == 1
    assert await offer.settled() == "released"


async def test_corrupted_memory_is_found(world: World):
    """Bytes that changed after they were announced never pass; the block is tried twice."""
    offer = world.open()
    world.announce(offer, 0, [1, 2, 3], FIRST)
    world.theirs.block(BlockId(2))[500] ^= 1
    with pytest.raises(DigestMismatch, match="block 1 "):
        await world.fetch([0, 1, 2])
    assert world.reader.stats().digest_failures == 2
    assert await offer.settled() == "released"


async def test_bad_capability_is_refused(world: World):
    """Without the scheduler's signature nothing is announced."""
    world.announce(world.open(), 0, [1], FIRST)
    with pytest.raises(TransferRefused, match="capability"):
        await world.fetch([0], ref=world.ref(capability=b"x" * 32))
    assert world.source.stats().refused == 1
    assert (await world.fetch([0])).num_blocks_read == 1


async def test_capability_of_another_request_is_refused(world: World):
    """A capability opens its own request only."""
    world.announce(world.open("mine"), 0, [1], FIRST)
    world.announce(world.open("other"), 0, [2], FIRST)
    with pytest.raises(TransferRefused, match="capability"):
        await world.fetch([0], "other", ref=world.ref("mine"))


async def test_offer_for_another_attempt_is_refused(world: World):
    """A reader whose attempt was overtaken gets nothing, even with a signature."""
    offer = world.source.open(RequestId("r"), 1, AttemptId("attempt-2"), READER)
    world.announce(offer, 0, [1], FIRST)
    with pytest.raises(TransferRefused, match="another attempt"):
        await world.fetch([0])
    assert offer.is_open


async def test_unequal_pools_are_refused(kind):
    """Another fingerprint: not a byte moves."""
    async with make_world(kind, reader_fingerprint="pool-b") as world:
        world.announce(world.open(), 0, [1], FIRST)
        with pytest.raises(TransferRefused, match="pools do not fit"):
            await world.fetch([0])
        assert world.source.stats().refused >= 1


async def test_unequal_block_sizes_are_refused(kind):
    """A source with blocks of another size is turned down by the reader."""
    async with make_world(kind, reader_block_bytes=999) as world:
        world.announce(world.open(), 0, [1], FIRST)
        with pytest.raises(TransferRefused, match="1000 bytes"):
            await world.fetch([0])


async def test_another_incarnation_is_refused(world: World):
    """A worker that was restarted on the same address is not the one that holds the blocks."""
    with pytest.raises(TransferRefused, match="incarnation"):
        await world.fetch([0], ref=world.ref(incarnation=Incarnation("prefill-life-0")))


async def test_source_dies_mid_read(kind):
    """The fetch fails, and not a byte lands afterwards."""
    async with make_world(kind, num_blocks=24, block_bytes=1 << 20) as world:
        offer = world.open()
        world.announce(offer, 0, range(20))
        results: list = []
        world.tg.start_soon(collect, results, world.fetch(range(24)))
        await until(lambda: world.landed(0, 0))
        world.source_scope.cancel()
        await until(lambda: bool(results))
        world.ours.buffer[:] = b"\xee" * len(world.ours.buffer)
        assert isinstance(results[0], TransferError)
        assert await offer.settled() == "withdrawn"
        await settle()
        assert bytes(world.ours.buffer) == b"\xee" * len(world.ours.buffer)


async def test_source_that_is_gone_cannot_be_reached(world: World):
    """Nobody there: an error, not a wait."""
    ref = world.ref()
    world.source_scope.cancel()
    await settle()
    with pytest.raises(TransferError):
        await world.fetch([0], ref=ref)


async def test_lost_connection_is_made_again(world: World):
    """The fetch goes on over a new link with what is missing; nothing is read twice."""
    results: list = []
    offer = world.open()
    world.announce(offer, 0, [1, 2])
    world.tg.start_soon(collect, results, world.fetch([10, 11, 12]))
    await until(lambda: world.reader.stats().blocks_read == 2)
    world.cut()
    world.announce(offer, 2, [3], FIRST)
    await until(lambda: bool(results))
    assert results[0].num_blocks_read == 3
    assert world.same(3, 12)
    stats = world.reader.stats()
    assert (stats.blocks_read, stats.retries) == (3, 1)


async def test_connection_lost_twice_is_an_error(world: World):
    """One new link per fetch, not more."""
    results: list = []
    offer = world.open()
    world.announce(offer, 0, [1])
    world.tg.start_soon(collect, results, world.fetch([10, 11]))
    await until(lambda: world.reader.stats().blocks_read == 1)
    (link,) = world.links()
    world.cut()
    await until(lambda: bool(world.links()) and world.links() != [link])
    await settle()
    world.cut()
    await until(lambda: bool(results))
    assert isinstance(results[0], TransferError)
    assert offer.is_open


async def test_reader_shut_down_fails_its_fetches(kind):
    """Ending the reader ends what it does."""
    async with make_world(kind) as world:
        results: list = []
        world.open()
        async with anyio.create_task_group() as tg:
            tg.start_soon(collect, results, world.fetch([0]))
            await until(lambda: world.source.stats().connections == 1)
            assert world.reader._links is not None
            world.reader._links._tg.cancel_scope.cancel()
        assert isinstance(results[0], TransferError)


async def test_accounts_are_exact(world: World):
    """Both ends count the same: bytes are blocks times the size of a block."""
    for i in range(4):
        world.announce(world.open(f"r{i}"), 0, [4 * i, 4 * i + 1, 4 * i + 2], FIRST)
    for i in range(4):
        await world.fetch([i, None, 8 + i], f"r{i}")
    ours, theirs = world.reader.stats(), world.source.stats()
    assert (ours.blocks_read, ours.bytes_read, ours.fetched, ours.failed) == (8, 8000, 4, 0)
    assert (theirs.released, theirs.open_offers, theirs.stale) == (4, 0, 0)
    if world.kind != "shm":
        assert (theirs.blocks_sent, theirs.bytes_sent) == (8, 8000)


async def test_digest_is_checked_over_our_own_bytes(world: World):
    """What was verified is what lies in the reader's region."""
    world.announce(world.open(), 0, [5], FIRST)
    await world.fetch([6])
    assert block_digest(world.ours.block(BlockId(6))) == block_digest(world.theirs.block(BlockId(5)))
