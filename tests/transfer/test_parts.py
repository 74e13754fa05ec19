"""The small owners, one by one."""

import fcntl
import mmap
import os

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.transfer import Region
from services.transfer.landing import ByteBudget
from services.transfer.offers import MAX_REMEMBERED, OfferBook
from services.transfer.region import map_blocks
from services.transfer.stats import SourceStats
from shared.clock import ManualClock
from shared.hashing import block_digest
from shared.ids import AttemptId, BlockId, RequestId
from shared.messages import Release
from tests.transfer.world import ATTEMPT, FIRST, KEY, READER, SOURCE, make_world

pytestmark = pytest.mark.anyio


@pytest.fixture
def region():
    region = Region.create(4, 1000)
    yield region
    region.close()


def test_blocks_are_slices_of_one_buffer(region: Region):
    """Writing a block writes its part of the region, and no other."""
    region.block(BlockId(2))[:] = b"\x07" * 1000
    assert bytes(region.buffer) == bytes(2000) + b"\x07" * 1000 + bytes(1000)


def test_mapped_region_shows_writes_and_takes_none(region: Region):
    """A reader sees the owner's bytes as they are written, and can neither write nor shrink them."""
    blocks = map_blocks(region.fd, 4, 1000)
    region.block(BlockId(3))[0] = 9
    assert blocks[3, 0] == 9
    with pytest.raises(ValueError, match="read-only"):
        blocks[0, 0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(region.fd, 4000, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 100)
    with pytest.raises(PermissionError):
        os.pwrite(region.fd, b"x", 0)


def test_unsafe_memory_is_not_mapped(region: Region):
    """A file that its owner could shrink under us, or one that is too small."""
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4000)
    with pytest.raises(OSError, match="not sealed"):
        map_blocks(fd, 4, 1000)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(OSError, match="smaller"):
        map_blocks(fd, 5, 1000)
    os.close(fd)


def test_region_closes_under_a_living_view():
    """A tensor that still looks at the memory keeps it, and closing twice is fine."""
    region = Region.create(2, 100)
    view = region.block(BlockId(1))
    region.close()
    region.close()
    assert bytes(view) == bytes(100)


async def test_budget_serves_in_order_and_loses_nothing():
    """A large request that waits is not overtaken by a small one; a cancelled one gives its place up."""
    budget = ByteBudget(100)
    order: list[str] = []
    await budget.take(80)
    async with anyio.create_task_group() as tg:

        async def waiter(name: str, num_bytes: int) -> None:
            await budget.take(num_bytes)
            order.append(name)

        gone = anyio.CancelScope()

        async def cancelled() -> None:
            with gone:
                await budget.take(100)

        for start in (lambda: tg.start_soon(cancelled), lambda: tg.start_soon(waiter, "large", 70)):
            start()
            await anyio.lowlevel.checkpoint()
        tg.start_soon(waiter, "small", 10)
        await anyio.lowlevel.checkpoint()
        assert not budget.try_take(1)
        gone.cancel()
        await anyio.lowlevel.checkpoint()
        assert order == []
        budget.give(80)
    assert order == ["large", "small"]
    assert budget.in_use == 80


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(1, 80), st.integers(0, 4), st.booleans()), min_size=1, max_size=25),
)
def test_budget_holds_under_any_order(max_bytes: int, jobs: list[tuple[int, int, bool]]):
    """Whatever is taken, cancelled and given back: never beyond the bound, and all of it is free at the end."""

    async def job(budget: ByteBudget, num_bytes: int, turns: int, cancel: bool) -> None:
        with anyio.CancelScope() as scope:
            if cancel:
                scope.cancel()
            await budget.take(num_bytes)
            try:
                for _ in range(turns):
                    assert 0 < budget.in_use <= max_bytes
                    await anyio.lowlevel.checkpoint()
            finally:
                budget.give(num_bytes)

    async def main() -> None:
        budget = ByteBudget(max_bytes)
        async with anyio.create_task_group() as tg:
            for one in jobs:
                tg.start_soon(job, budget, *one)
        assert budget.in_use == 0

    anyio.run(main)


def make_book() -> tuple[OfferBook, ManualClock, SourceStats]:
    clock, stats = ManualClock(), SourceStats(block_bytes=1)
    return OfferBook(clock, 60.0, SOURCE, KEY, 100, stats), clock, stats


def release(request: str) -> Release:
    return Release(request_id=RequestId(request), epoch=1, attempt=ATTEMPT)


def test_expiry_is_exact_without_tending():
    """The answer to a release depends on the time alone, not on when somebody last looked."""
    book, clock, _ = make_book()
    for request in ("in time", "late"):
        book.open(RequestId(request), 1, ATTEMPT, READER)
    clock.advance(60.0)
    assert book.release(release("in time"), READER).answer == "held"
    clock.advance(0.001)
    assert book.release(release("late"), READER).answer == "stale"


async def test_tending_expires_by_deadline():
    """Kept offers stay, overdue ones go, in whatever order they were opened."""
    book, clock, stats = make_book()
    offers = [book.open(RequestId(str(i)), 1, ATTEMPT, READER) for i in range(4)]
    clock.advance(40)
    offers[0].keep()
    offers[2].keep()
    clock.advance(30)
    book.tend()
    assert [o.outcome for o in offers] == [None, "expired", None, "expired"]
    assert await offers[1].settled() == "expired"
    assert (stats.open_offers, stats.expired) == (2, 2)


def test_memory_of_ended_offers_is_bounded():
    """The newest are remembered, the oldest forgotten."""
    book, _, _ = make_book()
    for i in range(MAX_REMEMBERED + 10):
        book.open(RequestId(str(i)), 1, ATTEMPT, READER)
        assert book.release(release(str(i)), READER).answer == "held"
    assert book.release(release("5"), READER).answer == "stale"
    assert book.release(release("20"), READER).answer == "held"


def test_ended_offer_swallows_announcements():
    """The worker may lose a race against the reader; that is no fault."""
    book, _, stats = make_book()
    offer = book.open(RequestId("r"), 1, ATTEMPT, READER)
    offer.withdraw("first")
    offer.withdraw("second")
    offer.announce(0, [BlockId(1)], [block_digest(b"x")])
    offer.announce(1, [BlockId(2)], [block_digest(b"y")], FIRST)
    offer.keep()
    assert (offer.outcome, stats.withdrawn) == ("withdrawn", 1)


def test_bugs_of_the_worker_are_asserted():
    """Gaps, repeats after the last, ids out of range, a second offer of one attempt."""
    book, _, _ = make_book()
    offer = book.open(RequestId("r"), 1, AttemptId("a"), READER)
    digest = block_digest(b"x")
    with pytest.raises(AssertionError):
        offer.announce(1, [BlockId(1)], [digest])
    with pytest.raises(AssertionError):
        offer.announce(0, [BlockId(100)], [digest])
    with pytest.raises(AssertionError):
        offer.announce(0, [BlockId(1)], [])
    with pytest.raises(AssertionError):
        book.open(RequestId("r"), 1, AttemptId("a"), READER)
    offer.announce(0, [BlockId(1)], [digest], FIRST)
    with pytest.raises(AssertionError):
        offer.announce(1, [BlockId(2)], [digest])


async def test_long_announcement_is_cut_into_frames():
    """Tens of thousands of blocks fit, and the first token comes with the last part."""
    async with make_world("tcp", num_blocks=9_000, block_bytes=8) as world:
        world.announce(world.open(), 0, range(9_000), FIRST)
        fetched = await world.fetch(range(9_000))
        assert (fetched.num_blocks_read, fetched.first) == (9_000, FIRST)
        assert world.theirs.buffer == world.ours.buffer
