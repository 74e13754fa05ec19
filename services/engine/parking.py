"""Where the KV of preempted seqs waits in host memory: which bay holds which block. The bytes are the runner's.

A seq is parked when its blocks are taken back, if there are bays for all of them and copying is cheaper than computing
again; it keeps its bays until a step has restored it, or it ends. A bay is written and read in the order of the
plans that say so, so that a bay given back may be given out at once.
"""

from collections.abc import Callable

from services.engine.seq import Seq
from services.engine.types import BayId, Move


def never(num_tokens: int, num_blocks: int) -> bool:
    """Recompute always."""
    return False


class Parking:
    """Owner of the bays. Mutates the seqs handed in."""

    def __init__(self, num_bays: int, is_worth: Callable[[int, int], bool] = never) -> None:
        """:param is_worth: (tokens, blocks): whether to copy them out and back costs less than to compute them."""
        self.num_bays = num_bays
        self._is_worth = is_worth
        self._free = [BayId(i) for i in reversed(range(num_bays))]
        self._moves: list[Move] = []  # out, not handed to the runner yet
        self.num_parked = 0  # seqs, since the start
        self.num_refused = 0  # of preempted ones: computed again

    @property
    def num_used(self) -> int:
        return self.num_bays - len(self._free)

    def park(self, seq: Seq) -> bool:
        """Keep what a seq has computed, whose blocks are about to be taken back. False: it will be computed again."""
        assert not seq.parked
        num_blocks = -(-seq.num_computed // seq.block_size)
        if not num_blocks or num_blocks > len(self._free) or not self._is_worth(seq.num_computed, num_blocks):
            self.num_refused += 1
            return False
        bays = [self._free.pop() for _ in range(num_blocks)]
        seq.parked, seq.num_parked = tuple(bays), seq.num_computed
        self._moves += zip(seq.table, bays, strict=False)
        self.num_parked += 1
        return True

    def restores(self, seq: Seq) -> list[Move]:
        """What to copy into the seq's new blocks, behind its hits. Its bays stay its own until `leave`."""
        first = seq.num_hit_blocks
        return list(zip(seq.table[first:], seq.parked[first:], strict=False))

    def leave(self, seq: Seq) -> None:
        """The seq does not need its bays any more."""
        self._free += seq.parked
        seq.parked, seq.num_parked = (), 0

    def take_moves(self) -> tuple[Move, ...]:
        """Copies out that the runner must make before anything writes the blocks, in order."""
        moves = tuple(self._moves)
        self._moves.clear()
        return moves

    def check(self, used: list[BayId]) -> None:
        """Assert that each bay is free or used once."""
        assert sorted((*self._free, *used)) == list(range(self.num_bays))
