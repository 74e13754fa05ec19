"""Blocks on their way between the pool and a seq's table, and what they cost.

Costs are counted in takeable blocks: a hit that a seq holds already costs nothing, a cached hit costs one, and so
does a new block or a promised one. The promise to a seq is what its credit leaves beyond the blocks that it has.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.block_pool import BlockPool
from services.engine.seq import Seq
from shared.ids import BlockId


@dataclass(frozen=True, slots=True)
class Quote:
    """What a seq would take to start."""

    hits: tuple[BlockId, ...]
    num_new: int
    growth: int  # promised, not named
    cost: int  # takeable blocks that it uses up
    within_credit: bool  # it has a right to all of them


class SeqBlocks:
    """Moves blocks; decides nothing. Mutates the pool and the seq handed in."""

    def __init__(self, pool: BlockPool, *, prefix_caching: bool) -> None:
        self._pool = pool
        self._prefix_caching = prefix_caching

    def quote(self, seq: Seq, max_hit_tokens: int) -> Quote:
        """What blocks for all of the seq's tokens would cost now."""
        pool, total = self._pool, seq.num_blocks
        hits = self._match(seq, max_hit_tokens // pool.block_size) if self._prefix_caching else []
        num_idle = sum(1 for block in hits if not pool.refs(block))
        growth = max(0, min(seq.credit, pool.total) - total)
        num_new = total - len(hits)
        return Quote(tuple(hits), num_new, growth, num_idle + num_new + growth, 0 < total <= seq.credit)

    def acquire(self, seq: Seq, quote: Quote) -> list[BlockId]:
        """Take what was quoted; it must be affordable. Gives back the new blocks, which follow the hits."""
        assert not seq.table_len
        seq.num_shared = sum(1 for block in quote.hits if self._pool.refs(block))
        self._pool.hold(quote.hits)
        new = self._pool.take(quote.num_new)
        assert new is not None, "acquired more than is there"
        kept = self._pool.promise(quote.growth)
        assert kept, "promised more than is there"
        seq.promised = quote.growth
        seq.num_hit_blocks = seq.num_filled = len(quote.hits)
        seq.extend_table((*quote.hits, *new))
        return new

    def grow(self, seq: Seq) -> bool:
        """One more block for a running seq, from its promise if it has one."""
        owed = min(1, seq.promised)
        block = self._pool.take(1, promised=owed)
        if block is None:
            return False
        seq.promised -= owed
        seq.extend_table(block)
        return True

    def surrender(self, seq: Seq) -> None:
        """All blocks of the seq go back, and its promise is void."""
        if seq.num_announced:
            self._pool.unpin(seq.table[: seq.num_announced])
            seq.num_announced = 0
        self._pool.forgive(seq.promised)
        self._pool.release(seq.table)
        self._reset(seq)

    def quarantine(self, seq: Seq) -> None:
        """A landing seq gives up: its hits go back, the reserved blocks wait for the transfer to be quiet."""
        hits, landing = seq.table[: seq.num_hit_blocks], seq.table[seq.num_hit_blocks :]
        self._pool.forgive(seq.promised)
        self._pool.release(hits)
        self._pool.quarantine(landing)
        self._reset(seq)
        seq.extend_table(landing)

    def fill(self, seq: Seq) -> None:
        """Blocks that the seq has computed to the end, and the pool does not know yet to be full, can be hit now."""
        first, last = seq.num_filled, seq.num_computed // self._pool.block_size
        if not self._prefix_caching or first >= last:
            return
        seq.num_filled = last
        seq.extend_hashes(last)
        for index in range(first, last):
            self._pool.fill(seq.table[index], seq.hashes[index], seq.parent_hash(index))

    def enough(self, quote: Quote, wanted: int, victims: Iterable[Seq]) -> list[Seq] | None:
        """The first of `victims`, as few as will do, whose blocks make `wanted` blocks takeable, the quote's hits not
        counted; None if all do not. A block that two seqs hold is gained only if both give it back."""
        gained, chosen = self._pool.takeable, []
        given_back: Counter[BlockId] = Counter()
        hits = frozenset(quote.hits)
        for seq in victims:
            if gained >= wanted:
                break
            chosen.append(seq)
            gained += seq.promised
            for block in seq.table:
                given_back[block] += 1
                gained += block not in hits and given_back[block] == self._pool.refs(block)
        return chosen if gained >= wanted else None

    def _match(self, seq: Seq, max_blocks: int) -> list[BlockId]:
        seq.extend_hashes(max_blocks)
        return self._pool.match(seq.hashes[:max_blocks])

    def _reset(self, seq: Seq) -> None:
        seq.clear_table()
        seq.promised = seq.num_shared = seq.num_hit_blocks = seq.num_computed = seq.num_planned = 0
        seq.num_pending = seq.num_digested = seq.num_filled = 0
        seq.shares_tail = False
