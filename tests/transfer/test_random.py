"""Any interleaving of announcements, faults, cancels and time: a fetch that returns has the right bytes, and one
that has ended writes nothing more."""

import random

import anyio
import anyio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st

from services.transfer import Fetched, Offer
from services.transfer.fake import Faults
from shared.errors import TransferError
from shared.ids import BlockId
from tests.transfer.world import FIRST, World, make_world

NUM_REQUESTS, BLOCKS_EACH = 4, 6
SCRATCHED = b"\xee" * 100

ACTIONS = st.sampled_from(["announce"] * 6 + ["turns"] * 3 + ["cancel", "withdraw", "cut", "time", "keep", "corrupt"])


class Run:
    """One request: its offer, its fetch, and what became of both."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.ids = [BlockId(number * BLOCKS_EACH + i) for i in range(BLOCKS_EACH)]
        self.dest = [BlockId(len(self.ids) * NUM_REQUESTS - 1 - b) for b in self.ids]
        self.offer: Offer | None = None
        self.num_announced = 0
        self.scope = anyio.CancelScope()
        self.outcome: Fetched | TransferError | str = ""
        self.pristine = [bytes(world.theirs.block(b)) for b in self.ids]

    async def fetch(self) -> None:
        with self.scope:
            try:
                self.outcome = await self.world.fetch(self.dest, f"r{self.number}")
                assert [bytes(self.world.ours.block(b)) for b in self.dest] == self.pristine
            except TransferError as exc:
                self.outcome = exc
        self.outcome = self.outcome or "cancelled"
        for block in self.dest:  # ours again: whatever lands now is a fault
            self.world.ours.block(block)[:] = SCRATCHED

    def announce(self) -> None:
        if self.offer is None:
            self.offer = self.world.open(f"r{self.number}")
        elif self.num_announced < BLOCKS_EACH:
            end = min(self.num_announced + 2, BLOCKS_EACH)
            last = FIRST if end == BLOCKS_EACH else None
            first, self.num_announced = self.num_announced, end
            if self.offer.is_open:
                self.world.announce(self.offer, first, self.ids[first:end], last)

    async def act(self, action: str) -> None:
        if action == "announce":
            self.announce()
        elif action == "cancel":
            self.scope.cancel()
        elif action == "withdraw" and self.offer is not None:
            self.offer.withdraw("no more")
        elif action == "keep" and self.offer is not None:
            self.offer.keep()
        elif action == "cut":
            self.world.cut()
        elif action == "time":
            self.world.clock.advance(35)
        elif action == "corrupt" and self.num_announced and not self.outcome:
            self.world.theirs.block(self.ids[0])[7] ^= 0x55
        for _ in range(3 if action != "turns" else 25):
            await anyio.lowlevel.checkpoint()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(ACTIONS, st.integers(0, NUM_REQUESTS - 1)), max_size=50),
    st.frozensets(st.integers(0, 40), max_size=3),
    st.frozensets(st.integers(0, 40), max_size=2),
    st.integers(1, 1000),
)
def test_no_interleaving_breaks_a_fetch(actions, flips, drops, max_inflight_bytes):
    """Good bytes or an error; untouched memory afterwards; all offers settle and all books balance."""

    async def main() -> None:
        faults = Faults(flip_blocks=flips, drop_at_blocks=drops)
        async with make_world(
            "fake",
            num_blocks=NUM_REQUESTS * BLOCKS_EACH,
            block_bytes=100,
            faults=faults,
            max_inflight_bytes=max_inflight_bytes,
        ) as world:
            runs = [Run(world, i) for i in range(NUM_REQUESTS)]
            async with anyio.create_task_group() as tg:
                for run in runs:
                    tg.start_soon(run.fetch)
                for action, number in actions:
                    await runs[number].act(action)
                await finish(world, runs)
            check(world, runs)

    anyio.run(main)


async def finish(world: World, runs: list[Run]) -> None:
    """Announce what is left, then let time end what hangs."""
    order = random.Random(0).sample(runs * 8, len(runs) * 8)
    for run in order:
        await run.act("announce")
    for _ in range(40):
        for run in runs:
            await run.act("turns")
        world.clock.advance(30)


def check(world: World, runs: list[Run]) -> None:
    for run in runs:
        assert run.outcome
        assert run.offer is not None
        assert not run.offer.is_open
        for block in run.dest:
            assert bytes(world.ours.block(block)) == SCRATCHED
    ours, theirs = world.reader.stats(), world.source.stats()
    assert ours.fetched == sum(isinstance(run.outcome, Fetched) for run in runs)
    assert ours.failed == sum(isinstance(run.outcome, TransferError) for run in runs)
    assert theirs.released + theirs.expired + theirs.withdrawn == NUM_REQUESTS
    assert theirs.open_offers == theirs.waiting_wants == 0
    assert world.reader._budget.in_use == 0
