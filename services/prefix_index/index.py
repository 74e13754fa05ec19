"""Who holds which block: the pure part of the prefix index.

Per kind of pool (fingerprint) a map from block hash to the set of its holders, kept as the bits of an int; per worker
its hashes in the order of their arrival. A worker's state here is either *in step*, or *unsure* after a hole in its
sequence: then nothing is known of it until it says `Cleared`, after which its events are complete again.

All of it is a hint. What is missing costs a recomputation, what is wrong is refused by the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from shared.ids import BlockHash, Incarnation
from shared.messages import Cleared, KvEvents, Removed, Stored

MAX_GONE = 4096
"""Dead incarnations remembered, so that their late events do not bring them back."""


@dataclass(slots=True)
class _Worker:
    fingerprint: str
    bit: int
    last_seq: int = 0
    in_step: bool = True
    hashes: dict[BlockHash, None] = field(default_factory=dict)  # a set in order of arrival


@dataclass(slots=True)
class _Pool:
    """All workers of one fingerprint."""

    holders: dict[BlockHash, int] = field(default_factory=dict)  # hash -> bits of its holders
    workers: dict[int, Incarnation] = field(default_factory=dict)  # bit -> worker


@dataclass(frozen=True, slots=True)
class IndexStats:
    num_workers: int
    num_unsure: int  # workers whose events have a hole, waiting for `Cleared`
    num_entries: int  # (worker, block) pairs
    num_hashes: int
    num_events: int
    num_repeats: int
    num_gaps: int
    num_evicted: int  # entries dropped to stay within the bound


class PrefixIndex:
    """Owns the map. `check()` proves that both directions say the same."""

    def __init__(self, max_blocks: int) -> None:
        assert max_blocks > 0
        self._max_blocks = max_blocks
        self._workers: dict[Incarnation, _Worker] = {}  # oldest first
        self._pools: dict[str, _Pool] = {}
        self._gone: dict[Incarnation, None] = {}
        self._entries = 0
        self._events = self._repeats = self._gaps = self._evicted = 0

    def apply(self, message: KvEvents) -> bool:
        """Take in one message. False: it shows a hole that it does not mend, and the worker must resend."""
        if message.incarnation in self._gone:
            return True
        worker = self._workers.get(message.incarnation)
        if worker is None or worker.fingerprint != message.fingerprint:
            self._drop(message.incarnation)
            worker = self._join(message.incarnation, message.fingerprint)
        if message.seq <= worker.last_seq:
            self._repeats += 1
            return True
        hole = message.seq != worker.last_seq + 1
        worker.last_seq = message.seq
        if hole:
            self._gaps += 1
            self._clear(worker)
            worker.in_step = False
        for event in message.events:
            self._apply_one(worker, event)
        self._evict()
        return worker.in_step or not hole

    def expect(self, incarnation: Incarnation, fingerprint: str) -> None:
        """Hold a worker for unsure until its `Cleared`: one that was at work before this index was. Known workers stay
        as they are."""
        if incarnation not in self._workers and incarnation not in self._gone:
            self._join(incarnation, fingerprint).in_step = False

    def forget(self, incarnation: Incarnation) -> None:
        """The worker is dead: all that it held is gone, and it never comes back."""
        self._drop(incarnation)
        self._gone[incarnation] = None
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def match(self, fingerprint: str, hashes: Sequence[BlockHash]) -> dict[Incarnation, int]:
        """Leading blocks of the chain that each worker holds; workers without the first are left out."""
        pool = self._pools.get(fingerprint)
        if pool is None or not hashes:
            return {}
        runs: dict[Incarnation, int] = {}
        bits = pool.holders.get(hashes[0], 0)
        for length in range(1, len(hashes)):
            still = bits & pool.holders.get(hashes[length], 0)
            if still != bits:
                self._end_runs(pool, bits & ~still, length, runs)
                bits = still
            if not bits:
                return runs
        self._end_runs(pool, bits, len(hashes), runs)
        return runs

    def unsure(self) -> list[Incarnation]:
        """Workers whose `Cleared` is awaited."""
        return [incarnation for incarnation, worker in self._workers.items() if not worker.in_step]

    def incarnations(self) -> list[Incarnation]:
        return list(self._workers)

    def stats(self) -> IndexStats:
        return IndexStats(
            num_workers=len(self._workers),
            num_unsure=len(self.unsure()),
            num_entries=self._entries,
            num_hashes=sum(len(pool.holders) for pool in self._pools.values()),
            num_events=self._events,
            num_repeats=self._repeats,
            num_gaps=self._gaps,
            num_evicted=self._evicted,
        )

    def check(self) -> None:
        """Assert that the map and the workers' own sets agree, and that the bound holds."""
        assert self._entries == sum(len(w.hashes) for w in self._workers.values()) <= self._max_blocks
        for fingerprint, pool in self._pools.items():
            assert pool.workers, f"empty pool {fingerprint} was kept"
            mirror: dict[BlockHash, int] = {}
            for bit, incarnation in pool.workers.items():
                assert self._workers[incarnation].bit == bit
                for block_hash in self._workers[incarnation].hashes:
                    mirror[block_hash] = mirror.get(block_hash, 0) | bit
            assert mirror == pool.holders
        assert sum(len(pool.workers) for pool in self._pools.values()) == len(self._workers)

    # --- changes ---

    def _join(self, incarnation: Incarnation, fingerprint: str) -> _Worker:
        pool = self._pools.setdefault(fingerprint, _Pool())
        bit = 1
        while bit in pool.workers:
            bit <<= 1
        pool.workers[bit] = incarnation
        self._workers[incarnation] = worker = _Worker(fingerprint, bit)
        return worker

    def _drop(self, incarnation: Incarnation) -> None:
        worker = self._workers.get(incarnation)
        if worker is None:
            return
        self._clear(worker)
        del self._workers[incarnation]
        pool = self._pools[worker.fingerprint]
        del pool.workers[worker.bit]
        if not pool.workers:
            del self._pools[worker.fingerprint]

    def _apply_one(self, worker: _Worker, event: Stored | Removed | Cleared) -> None:
        self._events += 1
        match event:
            case Cleared():
                self._clear(worker)
                worker.in_step = True
            case Stored(hashes=hashes) if worker.in_step:
                for block_hash in hashes:
                    self._add(worker, block_hash)
            case Removed(hashes=hashes) if worker.in_step:
                for block_hash in hashes:
                    self._remove(worker, block_hash)

    def _add(self, worker: _Worker, block_hash: BlockHash) -> None:
        if block_hash not in worker.hashes:
            worker.hashes[block_hash] = None
            holders = self._pools[worker.fingerprint].holders
            holders[block_hash] = holders.get(block_hash, 0) | worker.bit
            self._entries += 1

    def _remove(self, worker: _Worker, block_hash: BlockHash) -> None:
        if block_hash in worker.hashes:
            del worker.hashes[block_hash]
            self._unmap(worker, block_hash)

    def _clear(self, worker: _Worker) -> None:
        for block_hash in worker.hashes:
            self._unmap(worker, block_hash)
        worker.hashes = {}

    def _unmap(self, worker: _Worker, block_hash: BlockHash) -> None:
        holders = self._pools[worker.fingerprint].holders
        left = holders[block_hash] & ~worker.bit
        if left:
            holders[block_hash] = left
        else:
            del holders[block_hash]
        self._entries -= 1

    def _evict(self) -> None:
        """Above the bound, drop the oldest entries of the oldest workers: a bit more than needed, as finding the oldest
        of a dict is slow once many have been deleted before it."""
        if self._entries <= self._max_blocks:
            return
        target = self._max_blocks - self._max_blocks // 64
        for worker in self._workers.values():
            for block_hash in list(islice(worker.hashes, max(0, self._entries - target))):
                self._remove(worker, block_hash)
                self._evicted += 1

    @staticmethod
    def _end_runs(pool: _Pool, bits: int, length: int, runs: dict[Incarnation, int]) -> None:
        """Note `length` for each worker in `bits`. Fills `runs`."""
        while bits:
            bit = bits & -bits
            runs[pool.workers[bit]] = length
            bits ^= bit
