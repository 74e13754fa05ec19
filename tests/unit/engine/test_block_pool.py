"""The block pool: who has a block, who may take it, and in which order cached ones go."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engine.block_pool import BlockPool
from shared.hashing import block_hash, chain_root
from shared.ids import BlockDigest, BlockHash, BlockId
from shared.messages import Removed, Stored

ROOT = chain_root()


def chain(*tokens: int) -> list[tuple[BlockHash, BlockHash]]:
    """(hash, parent) of a chain of one-token blocks."""
    pairs, parent = [], ROOT
    for token in tokens:
        pairs.append((block_hash(parent, [token]), parent))
        parent = pairs[-1][0]
    return pairs


def store(pool: BlockPool, *tokens: int) -> list[BlockId]:
    """Blocks of a chain, filled and held."""
    blocks = pool.take(len(tokens))
    assert blocks is not None
    for block, (digest, parent) in zip(blocks, chain(*tokens), strict=True):
        pool.fill(block, digest, parent)
    return blocks


def test_take_answers_none_and_changes_nothing_when_short():
    """A request for more than is takeable leaves the pool as it was."""
    pool = BlockPool(4, 1)
    assert pool.take(3) is not None
    before = pool.census()
    assert pool.take(2) is None
    assert pool.census() == before
    assert pool.takeable == 1


def test_promised_blocks_are_out_of_reach_for_others():
    """Only the holder of a promise may take promised blocks."""
    pool = BlockPool(4, 1)
    assert pool.promise(3)
    assert pool.take(2) is None
    assert pool.take(1) is not None
    assert not pool.promise(1)
    assert pool.take(1) is None
    taken = pool.take(3, promised=3)
    assert taken is not None
    assert len(taken) == 3
    assert pool.promised == 0
    pool.check()


def test_released_blocks_are_found_by_their_hashes():
    """A released full block is cached and hit; a block without a hash is free."""
    pool = BlockPool(4, 1)
    blocks = store(pool, 7, 8)
    rest = pool.take(1)
    assert rest is not None
    pool.release([*blocks, *rest])
    assert pool.census() == {"free": 2, "held": 0, "cached": 2, "pinned": 0, "landing": 0, "quarantined": 0}
    wanted = [digest for digest, _ in chain(7, 8, 9)]
    assert pool.match(wanted) == blocks
    assert pool.match(wanted[1:]) == blocks[1:]
    pool.hold(blocks)
    assert pool.num_cached == 0
    assert [pool.refs(block) for block in blocks] == [1, 1]


def test_match_stops_at_the_first_gap():
    """Later blocks of a chain are no use without the earlier ones."""
    pool = BlockPool(4, 1)
    store(pool, 1)
    digests = [digest for digest, _ in chain(1, 2, 3)]
    assert len(pool.match(digests)) == 1
    assert pool.match(digests[1:]) == []


def test_eviction_takes_the_oldest_chain_from_its_tail():
    """The least recently used chain goes first, children before their parents."""
    pool = BlockPool(6, 1)
    old, young = store(pool, 1, 2, 3), store(pool, 4, 5, 6)
    pool.release(old)
    pool.release(young)
    assert pool.take(4) == [old[2], old[1], old[0], young[2]]


def test_a_used_prefix_outlives_its_untouched_tail():
    """Holding a prefix again makes it young; the tail that nobody asked for goes first."""
    pool = BlockPool(4, 1)
    first, other = store(pool, 1, 2), store(pool, 8, 9)
    pool.release(first)
    pool.release(other)
    pool.hold(first[:1])
    pool.release(first[:1])
    assert pool.take(3) == [first[1], other[1], other[0]]


def test_parent_whose_child_is_held_goes_only_when_nothing_else_is_left():
    """A cached parent below a held child (beside a duplicate of itself) is still evictable, but last."""
    pool = BlockPool(4, 1)
    parent = store(pool, 1)
    twin = pool.take(1)
    child = pool.take(1)
    assert twin is not None
    assert child is not None
    pool.fill(twin[0], *chain(1)[0])  # a duplicate: not mapped
    pool.fill(child[0], *chain(1, 2)[1])
    pool.release(parent)
    leaf = store(pool, 5)
    pool.release(leaf)
    assert pool.take(2) == [leaf[0], parent[0]]
    pool.check()


def test_a_parent_that_got_a_child_while_idle_is_evicted_after_it():
    """A block that was a leaf when it was released is none any more once a child of it is found."""
    pool = BlockPool(4, 1)
    parent = store(pool, 1)
    later = pool.take(2)
    assert later is not None
    pool.release(parent)
    for block, (digest, above) in zip(later, chain(1, 2), strict=True):
        pool.fill(block, digest, above)
    pool.release(later)
    assert pool.take(4) == [later[0], BlockId(3), later[1], parent[0]]


def test_the_first_of_two_equal_blocks_keeps_the_hash():
    """A duplicate carries no map entry and is free once released."""
    pool = BlockPool(2, 1)
    first, second = store(pool, 1), store(pool, 1)
    assert pool.match([chain(1)[0][0]]) == first
    pool.release(second)
    assert pool.num_free == 1
    assert pool.num_cached == 0
    assert pool.drain_events() == (Stored(hashes=(chain(1)[0][0],)),)


def test_events_tell_what_entered_and_left_in_order():
    """Runs of equal changes are one event, and draining empties the list."""
    pool = BlockPool(2, 1)
    a, b = (digest for digest, _ in chain(1, 2))
    pool.release(store(pool, 1, 2))
    assert pool.take(1) is not None
    assert pool.drain_events() == (Stored(hashes=(a, b)), Removed(hashes=(b,)))
    assert pool.drain_events() == ()
    assert pool.hashes() == (a,)


def test_a_digest_lives_until_the_block_is_reused():
    """It survives caching and hits, not the next taking."""
    pool = BlockPool(1, 1)
    block = store(pool, 1)
    pool.set_digest(block[0], BlockDigest(b"d"))
    pool.release(block)
    pool.hold(block)
    assert pool.digest(block[0]) == b"d"
    pool.release(block)
    assert pool.take(1) == block
    assert pool.digest(block[0]) is None


def test_copy_on_write_leaves_a_shared_block_alone():
    """The writer of a shared block gets another; a lone owner writes in place; None if there is no room."""
    pool = BlockPool(3, 1)
    shared = store(pool, 1)[0]
    assert pool.cow(shared) not in (shared, None)
    assert pool.num_cached == 1
    pool.hold([shared])
    pool.hold([shared])
    own = pool.take(1)
    assert own is not None
    assert pool.cow(own[0]) == own[0]
    assert pool.cow(shared) is None
    assert pool.refs(shared) == 2
    pool.check()


def test_pinned_blocks_must_be_unpinned_before_they_go_back():
    """A block that a reader may be reading cannot be released."""
    pool = BlockPool(1, 1)
    block = store(pool, 1)
    pool.pin(block)
    assert pool.census()["pinned"] == 1
    with pytest.raises(AssertionError):
        pool.release(block)


def test_quarantined_blocks_come_back_only_when_the_transfer_is_quiet():
    """They are neither takeable nor found until quarantine ends."""
    pool = BlockPool(2, 1)
    blocks = pool.take(2)
    assert blocks is not None
    pool.begin_landing(blocks)
    pool.quarantine(blocks)
    assert pool.census()["quarantined"] == 2
    assert pool.take(1) is None
    pool.end_quarantine(blocks)
    assert pool.takeable == 2
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random holders of random chains over a small alphabet, against a brute-force account of the map."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 1)
        self.holders: list[list[BlockId]] = []
        self.computing: list[tuple[list[BlockId], list[tuple[BlockHash, BlockHash]]]] = []  # to be filled
        self.mapped: dict[BlockHash, BlockId] = {}
        self.parents: dict[BlockHash, BlockHash] = {}
        self.last_use: dict[BlockId, int] = {}
        self.now = 0

    def expected_victim(self) -> BlockId:
        """The idle block without mapped children that was released longest ago, found by looking at them all."""
        held = {block for table in self.holders for block in table}
        idle = {block: digest for digest, block in self.mapped.items() if block not in held}
        below = set(self.parents.values())
        leaves = [block for block, digest in idle.items() if digest not in below]
        return min(leaves or idle, key=lambda block: self.last_use[block])

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def start(self, tokens: list[int]) -> None:
        """A seq takes what hits and computes the rest."""
        pairs = chain(*tokens)
        hits = self.pool.match([digest for digest, _ in pairs])
        want: list[BlockId] = []
        for digest, _ in pairs:
            if digest not in self.mapped:
                break
            want.append(self.mapped[digest])
        assert hits == want
        num_new = len(tokens) - len(hits)
        if self.pool.takeable - sum(not self.pool.refs(block) for block in hits) < num_new:
            return
        self.pool.hold(hits)
        self.holders.append(hits)
        new: list[BlockId] = []
        for _ in range(num_new):
            new += self.take_one()
        self.holders[-1] = [*hits, *new]
        self.computing.append((self.holders[-1], pairs))

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """A seq's blocks are computed, maybe after another's that are equal."""
        table, pairs = self.computing.pop(data.draw(st.integers(0, len(self.computing) - 1)))
        for block, (digest, parent) in zip(table, pairs, strict=True):
            if block in self.mapped.values():
                continue
            self.pool.fill(block, digest, parent)
            if digest not in self.mapped:
                self.mapped[digest], self.parents[digest] = block, parent

    def take_one(self) -> list[BlockId]:
        victim = None if self.pool.num_free else self.expected_victim()
        block = self.pool.take(1)
        assert block is not None
        if victim is not None:
            assert block == [victim]
            digest = next(digest for digest, known in self.mapped.items() if known == victim)
            del self.mapped[digest], self.parents[digest]
        self.holders[-1] = self.holders[-1] + block
        return block

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.computing = [entry for entry in self.computing if entry[0] is not table]
        for block in table:
            self.now += 1
            self.last_use[block] = self.now
        self.pool.release(table)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert set(self.pool.hashes()) == set(self.mapped)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_pool_machine = PoolMachine.TestCase
