"""Who gives way when blocks are scarce. Decides, and moves nothing.

Rank is (due, arrival), see `seq.py`. The eldest, first by rank of all that wait or run, gives nothing up: so it goes on
at every step, and every seq is the eldest some day. (If it cannot start and nobody else can go on, the first of those
that run takes its place: `Seating`.) Three rights, from the strongest:
- the eldest's, to its next block, from anybody behind it;
- of a seq within its credit, to what others have beyond theirs;
- of a better rank that reserves, to what running seqs of lower rank have.
Blocks that a transfer is filling cannot be taken back. So a reservation leaves room for the eldest to go on while
transfers last (`headroom`).
"""

from services.engine.block_pool import BlockPool
from services.engine.roster import Roster
from services.engine.seq import Seq, SeqState
from services.engine.seq_blocks import Quote, SeqBlocks

HEADROOM_BLOCKS = 8
"""Blocks that reservations leave to the eldest, at most; an eighth of a small pool."""


class Rationing:
    """Reads pool and roster."""

    def __init__(self, pool: BlockPool, blocks: SeqBlocks, roster: Roster, max_model_len: int) -> None:
        self._pool, self._blocks, self._roster = pool, blocks, roster
        self._max_model_len = max_model_len

    def victim(self, seq: Seq) -> Seq | None:
        """Who gives a block to a running seq: the last in rank behind it that is over its credit. Only the eldest takes
        from one that is not: from any other, that one would take the blocks back at once, by right."""
        behind = list(self._roster.behind(seq.rank))
        over = next((other for other in behind if other.is_over_credit()), None)
        if over is None and behind and seq is self._roster.eldest():
            return behind[0]
        return over

    def to_start(self, quote: Quote) -> list[Seq] | None:
        """Seqs to preempt so that a waiting seq can start; None: it must wait."""
        if quote.within_credit:
            return self._blocks.enough(quote, quote.cost, self._roster.over_credit())
        # A block for each seq that may ask for one next, or the newcomer would be preempted at once.
        spare = sum(1 for seq in self._roster.running if not seq.promised and not seq.spec.prefill_only)
        return [] if quote.cost + spare <= self._pool.takeable else None

    def to_reserve(self, seq: Seq, quote: Quote) -> list[Seq] | None:
        """Seqs to preempt so that a reservation can be made; None: not now. Never one in flight."""
        head = self._roster.waiting[0] if self._roster.waiting else None
        if head is not None and head.rank < seq.rank:
            wanted = quote.cost + max(head.num_blocks, self.headroom())
            return [] if wanted <= self._pool.takeable else None
        over = list(self._roster.over_credit()) if quote.within_credit else []
        lower = [victim for victim in self._roster.behind(seq.rank) if victim not in over]
        return self._blocks.enough(quote, quote.cost + self.headroom(), [*over, *lower])

    def headroom(self) -> int:
        """Takeable blocks that a reservation must leave, so that the eldest does not wait for a transfer's end."""
        eldest = self._roster.eldest()
        if eldest is None or eldest.state is not SeqState.RUNNING or eldest.spec.prefill_only:
            return 0
        size = self._pool.block_size
        longest = min(eldest.spec.num_prompt_tokens + eldest.spec.sampling.max_tokens, self._max_model_len)
        left = -(-longest // size) - eldest.table_len - eldest.promised
        return max(0, min(left, HEADROOM_BLOCKS, max(1, self._pool.total // HEADROOM_BLOCKS)))
