"""Which block holds which prefix, and which of the idle ones goes first. A part of `BlockPool`, and of nothing else.

A *mapped* block can be found by its hash. A mapped block that no seq holds is *idle*: it is what "cached" counts,
and it is evicted in the order of last use, but never before a mapped child of its chain (a prefix without its
head can be found by nobody). The order is a heap of (stamp, block) whose stale entries are skipped on the way out.
"""

import heapq
from collections.abc import Sequence
from itertools import groupby

from shared.ids import BlockHash, BlockId
from shared.messages import Removed, Stored


class PrefixCache:
    """Map hash -> block, use order of idle blocks, and the events that tell others about the map."""

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._parent_of: dict[BlockHash, BlockHash] = {}
        self._num_children: dict[BlockHash, int] = {}  # mapped children; the parent itself may be unmapped
        self._idle: dict[BlockId, int] = {}  # block -> stamp of its last use
        self._leaves: list[tuple[int, BlockId]] = []  # heap; holds every idle leaf under its present stamp
        self._stamp = 0
        self._changes: list[tuple[bool, BlockHash]] = []  # (stored?, hash), in order

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._hash_of

    def is_idle(self, block: BlockId) -> bool:
        return block in self._idle

    def hashes(self) -> tuple[BlockHash, ...]:
        """Every hash in the map."""
        return tuple(self._block_of)

    def hash_of(self, block: BlockId) -> BlockHash | None:
        return self._hash_of.get(block)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest run of `hashes`, from the first, that is in the map."""
        found: list[BlockId] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def put(self, block: BlockId, digest: BlockHash, parent: BlockHash) -> bool:
        """Map a held block. False, and no change, if another block has that hash already."""
        assert block not in self._hash_of, f"block {block} has a hash already"
        if digest in self._block_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self._parent_of[digest] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._changes.append((True, digest))
        return True

    def park(self, block: BlockId) -> None:
        """Nobody holds this mapped block any more: it may be evicted from now on."""
        assert block not in self._idle
        self._stamp += 1
        self._idle[block] = self._stamp
        self._push_if_leaf(block)

    def wake(self, block: BlockId) -> None:
        """A seq holds this idle block again."""
        del self._idle[block]

    def evict(self) -> BlockId:
        """Unmap the idle block that was used longest ago and has no mapped child, and give it back."""
        assert self._idle, "nothing to evict"
        while self._leaves:
            stamp, block = heapq.heappop(self._leaves)
            if self._idle.get(block) == stamp and not self._num_children.get(self._hash_of[block]):
                break
        else:  # every idle block has a child that some seq holds beside a duplicate of the parent
            block = min(self._idle, key=self._idle.__getitem__)
        del self._idle[block]
        self._unmap(block)
        return block

    def drain_events(self) -> tuple[Stored | Removed, ...]:
        """What entered and left the map since the last call, in order."""
        events = tuple(
            (Stored if stored else Removed)(hashes=tuple(digest for _, digest in run))
            for stored, run in groupby(self._changes, key=lambda change: change[0])
        )
        self._changes.clear()
        return events

    def check(self) -> None:
        """Assert that the tables agree with each other."""
        assert {b: h for h, b in self._block_of.items()} == self._hash_of
        assert self._parent_of.keys() == self._block_of.keys()
        children: dict[BlockHash, int] = {}
        for parent in self._parent_of.values():
            children[parent] = children.get(parent, 0) + 1
        assert children == self._num_children
        queued = set(self._leaves)
        for block, stamp in self._idle.items():
            assert block in self._hash_of
            assert children.get(self._hash_of[block]) or (stamp, block) in queued

    def _unmap(self, block: BlockId) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        parent = self._parent_of.pop(digest)
        self._changes.append((False, digest))
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            above = self._block_of.get(parent)
            if above is not None and above in self._idle:
                self._push_if_leaf(above)

    def _push_if_leaf(self, block: BlockId) -> None:
        if self._num_children.get(self._hash_of[block]):
            return
        if len(self._leaves) > 2 * len(self._idle) + 64:  # mostly stale: start again from what is true
            self._leaves = [(s, b) for b, s in self._idle.items() if not self._num_children.get(self._hash_of[b])]
            heapq.heapify(self._leaves)
        else:
            heapq.heappush(self._leaves, (self._idle[block], block))
