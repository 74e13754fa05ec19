"""The one owner of blocks: reference counts, the free list, the hash map and what is promised.

A block is in exactly one of these states:
free         nobody's; its bytes mean nothing
held         at least one seq has it in its block table
cached       no seq has it, but its hash is known: evictable, least recently used first, leaf before parent
pinned       held, and announced to another worker that may be reading it
landing      held by a seq whose KV is on its way; not readable yet
quarantined  was landing when its seq was aborted: not reusable until the transfer is known to be quiet
`promised` is no state but a debt: blocks that known seqs may still take within their credit. Growth beyond credit
never touches them.
"""

from collections.abc import Iterable, Sequence

from services.engine.prefix_cache import PrefixCache
from shared.ids import BlockDigest, BlockHash, BlockId
from shared.messages import Removed, Stored


class BlockPool:
    """Scarcity answers None (or False) and changes nothing; a wrong call asserts."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.total = num_blocks
        self.block_size = block_size
        self.promised = 0
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._digests: list[BlockDigest | None] = [None] * num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._landing: set[BlockId] = set()
        self._quarantined: set[BlockId] = set()
        self._cache = PrefixCache()

    @property
    def takeable(self) -> int:
        """Blocks that nobody has and nobody was promised."""
        return len(self._free) + self._cache.num_idle - self.promised

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._cache.num_idle

    def take(self, num_blocks: int, *, promised: int = 0) -> list[BlockId] | None:
        """Blocks with one reference each and unknown bytes, cached ones evicted if need be.

        :param promised: how many of them pay off a promise; the rest must be takeable.
        """
        assert 0 <= promised <= min(num_blocks, self.promised)
        if num_blocks - promised > self.takeable:
            return None
        self.promised -= promised
        return [self._take_one() for _ in range(num_blocks)]

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each of these mapped blocks (a prefix hit)."""
        for block in blocks:
            assert block in self._cache, f"block {block} is nobody's prefix"
            if not self._refs[block]:
                self._cache.wake(block)
            self._refs[block] += 1
        assert self.takeable >= 0, "a hit took a promised block"

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each of these held blocks (another choice of the same prompt)."""
        for block in blocks:
            assert self._refs[block] > 0
            assert block not in self._landing
            self._refs[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """One reference less to each; the last one leaves the block cached if it is mapped, else free."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released once too often"
            assert block not in self._landing
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            assert not self._pins[block], f"block {block} is announced"
            if block in self._cache:
                self._cache.park(block)
            else:
                self._free.append(block)

    def cow(self, block: BlockId) -> BlockId | None:
        """A block that its holder may write in place of `block`: itself if no one else can see it, else a taken one
        (the caller copies the bytes and puts it into its table; its reference to `block` is gone)."""
        if self.is_writable(block):
            return block
        assert self._refs[block] > 0
        taken = self.take(1)
        if taken is None:
            return None
        self.release([block])
        return taken[0]

    def promise(self, num_blocks: int) -> bool:
        """Set blocks aside without naming them."""
        assert num_blocks >= 0
        if num_blocks > self.takeable:
            return False
        self.promised += num_blocks
        return True

    def forgive(self, num_blocks: int) -> None:
        """The promise of these will not be called in."""
        assert 0 <= num_blocks <= self.promised
        self.promised -= num_blocks

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Longest run of these hashes, from the first, whose KV is in the pool. Takes no reference."""
        return self._cache.match(hashes)

    def fill(self, block: BlockId, digest: BlockHash, parent: BlockHash) -> None:
        """The held block is full and its KV is written: it can be found by its hash from now on, unless another
        block has that hash already (then this one stays unmapped, and is free once released)."""
        assert self._refs[block] > 0
        assert block not in self._landing
        self._cache.put(block, digest, parent)

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """These held blocks are announced to a reader."""
        for block in blocks:
            assert self._refs[block] > 0
            self._pins[block] += 1

    def unpin(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            assert self._pins[block] > 0
            self._pins[block] -= 1

    def begin_landing(self, blocks: Iterable[BlockId]) -> None:
        """A transfer will write these blocks, just taken."""
        for block in blocks:
            assert self._refs[block] == 1
            assert block not in self._cache
            self._landing.add(block)

    def end_landing(self, blocks: Iterable[BlockId]) -> None:
        """The transfer of these blocks is over, for better or worse: no byte of them can move any more."""
        for block in blocks:
            self._landing.remove(block)

    def quarantine(self, blocks: Iterable[BlockId]) -> None:
        """Their seq gave up, but the transfer may still write them."""
        for block in blocks:
            self._landing.remove(block)
            self._refs[block] = 0
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[BlockId]) -> None:
        """No byte of these can move any more."""
        for block in blocks:
            self._quarantined.remove(block)
            self._free.append(block)

    def refs(self, block: BlockId) -> int:
        return self._refs[block]

    def all_refs(self) -> list[int]:
        """`refs` of every block, in order. Not to be changed."""
        return self._refs

    def is_writable(self, block: BlockId) -> bool:
        """Whether exactly one seq can see the block's bytes, and nothing was said about them yet."""
        return self._refs[block] == 1 and block not in self._cache and not self._pins[block]

    def digest(self, block: BlockId) -> BlockDigest | None:
        """Digest of the block's bytes, if it was computed since they last changed."""
        return self._digests[block]

    def set_digest(self, block: BlockId, digest: BlockDigest) -> None:
        self._digests[block] = digest

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The hash that the block can be found by."""
        return self._cache.hash_of(block)

    def hashes(self) -> tuple[BlockHash, ...]:
        """Hashes of all blocks that a prefix can hit."""
        return self._cache.hashes()

    def drain_events(self) -> tuple[Stored | Removed, ...]:
        """Changes of `hashes()` since the last call, in order."""
        return self._cache.drain_events()

    def census(self) -> dict[str, int]:
        """Number of blocks in each state; they add up to `total`."""
        count = {"free": len(self._free), "held": 0, "cached": 0, "pinned": 0, "landing": 0, "quarantined": 0}
        for block in map(BlockId, range(self.total)):
            if block in self._quarantined:
                count["quarantined"] += 1
            elif block in self._landing:
                count["landing"] += 1
            elif self._pins[block]:
                count["pinned"] += 1
            elif self._refs[block]:
                count["held"] += 1
            elif self._cache.is_idle(block):
                count["cached"] += 1
        return count

    def check(self) -> dict[str, int]:
        """Assert that every block is in exactly one state and that promises can be kept; the census."""
        self._cache.check()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        count = self.census()
        assert sum(count.values()) == self.total, f"{count} is not {self.total} blocks"
        assert count["cached"] == self._cache.num_idle
        assert 0 <= self.promised <= count["free"] + count["cached"]
        held = {BlockId(block) for block, refs in enumerate(self._refs) if refs}
        assert held.isdisjoint(free)
        assert held.isdisjoint(self._quarantined)
        assert not any(map(self._cache.is_idle, held))
        assert self._landing <= held
        assert all(block in held for block, pins in enumerate(self._pins) if pins)
        assert not any(block in self._cache for block in (*free, *self._landing, *self._quarantined))
        return count

    def _take_one(self) -> BlockId:
        block = self._free.pop() if self._free else self._cache.evict()
        assert not self._refs[block]
        self._refs[block] = 1
        self._digests[block] = None
        return block
