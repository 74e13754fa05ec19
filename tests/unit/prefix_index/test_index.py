"""The pure index against a dict of sets, and its worker protocol against workers that know the truth."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.prefix_index.index import PrefixIndex
from shared.ids import BlockHash, Incarnation
from shared.messages import Cleared, KvEvents, Removed, Stored

A, B = Incarnation("a"), Incarnation("b")


def h(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(n.to_bytes(16, "little")) for n in numbers)


def kv(incarnation: Incarnation, seq: int, *events: Stored | Removed | Cleared, fingerprint: str = "f") -> KvEvents:
    return KvEvents(incarnation=incarnation, fingerprint=fingerprint, seq=seq, events=events)


def longest_runs(truth: dict[Incarnation, set[BlockHash]], hashes: tuple[BlockHash, ...]) -> dict[Incarnation, int]:
    """The obvious way: walk the chain for each worker."""
    runs = {}
    for incarnation, held in truth.items():
        length = 0
        while length < len(hashes) and hashes[length] in held:
            length += 1
        if length:
            runs[incarnation] = length
    return runs


@given(
    st.dictionaries(
        st.integers(0, 11).map(lambda i: Incarnation(f"w{i}")), st.frozensets(st.integers(0, 9)), max_size=12
    ),
    st.lists(st.integers(0, 9), max_size=12),
)
def test_match_is_the_longest_run_of_each_holder(held: dict[Incarnation, frozenset[int]], chain: list[int]) -> None:
    """Over random holdings and chains, with holes and repeats."""
    index = PrefixIndex(1000)
    for incarnation, numbers in held.items():
        assert index.apply(kv(incarnation, 1, Stored(hashes=h(*numbers))))
    truth = {incarnation: set(h(*numbers)) for incarnation, numbers in held.items()}
    assert index.match("f", h(*chain)) == longest_runs(truth, h(*chain))
    assert index.match("g", h(*chain)) == {}
    index.check()


def test_a_repeat_changes_nothing() -> None:
    """A message whose number was seen is dropped, also when it would take blocks away."""
    index = PrefixIndex(10)
    assert index.apply(kv(A, 1, Stored(hashes=h(1))))
    assert index.apply(kv(A, 2, Removed(hashes=h(1)), Stored(hashes=h(2))))
    assert index.apply(kv(A, 1, Stored(hashes=h(1))))
    assert index.match("f", h(1)) == {}
    assert index.match("f", h(2)) == {A: 1}
    assert index.stats().num_repeats == 1


def test_a_hole_forgets_the_worker_until_it_clears() -> None:
    """After a lost message nothing of that worker is believed, and others are not touched."""
    index = PrefixIndex(10)
    index.apply(kv(A, 1, Stored(hashes=h(1))))
    index.apply(kv(B, 1, Stored(hashes=h(1))))
    assert not index.apply(kv(A, 3, Stored(hashes=h(3))))
    assert index.match("f", h(1)) == {B: 1}
    assert index.apply(kv(A, 4, Stored(hashes=h(4))))
    assert index.match("f", h(4)) == {}
    assert index.unsure() == [A]
    assert index.apply(kv(A, 5, Stored(hashes=h(9)), Cleared(), Stored(hashes=h(1, 3))))
    assert index.match("f", h(1, 3)) == {A: 2, B: 1}
    assert index.match("f", h(9)) == {}
    assert index.unsure() == []


def test_a_second_hole_while_unsure_asks_again() -> None:
    """The lost message may have been the answer."""
    index = PrefixIndex(10)
    assert not index.apply(kv(A, 2, Stored(hashes=h(1))))
    assert index.apply(kv(A, 3))
    assert not index.apply(kv(A, 5))


def test_a_hole_that_ends_in_cleared_is_mended_at_once() -> None:
    """A message that clears the cache makes what was lost before it irrelevant."""
    index = PrefixIndex(10)
    assert index.apply(kv(A, 7, Cleared(), Stored(hashes=h(1))))
    assert index.match("f", h(1)) == {A: 1}


def test_the_dead_do_not_come_back() -> None:
    """Late events of a buried worker are ignored."""
    index = PrefixIndex(10)
    index.apply(kv(A, 1, Stored(hashes=h(1))))
    index.forget(A)
    assert index.apply(kv(A, 2, Stored(hashes=h(2))))
    assert index.incarnations() == []
    assert index.stats().num_entries == 0
    index.check()


def test_an_expected_worker_is_unsure_until_it_speaks() -> None:
    """A worker older than the index is not believed before its `Cleared`; one that is known already stays."""
    index = PrefixIndex(10)
    index.apply(kv(B, 1, Stored(hashes=h(1))))
    index.expect(A, "f")
    index.expect(B, "f")
    assert index.unsure() == [A]
    index.apply(kv(A, 1, Stored(hashes=h(1))))
    assert index.match("f", h(1)) == {B: 1}


def test_pools_do_not_mix() -> None:
    """The same block in pools of two kinds is two things; a worker that changes its kind starts anew."""
    index = PrefixIndex(10)
    index.apply(kv(A, 1, Stored(hashes=h(1)), fingerprint="f"))
    index.apply(kv(B, 1, Stored(hashes=h(1)), fingerprint="g"))
    assert index.match("f", h(1)) == {A: 1}
    assert index.match("g", h(1)) == {B: 1}
    assert not index.apply(kv(A, 2, fingerprint="g"))
    assert index.match("f", h(1)) == {}
    index.check()


def test_the_oldest_entries_of_the_oldest_worker_go_first() -> None:
    """The bound holds at every moment."""
    index = PrefixIndex(4)
    index.apply(kv(A, 1, Stored(hashes=h(1, 2, 3))))
    index.apply(kv(B, 1, Stored(hashes=h(1, 2, 3))))
    assert index.match("f", h(1)) == {B: 1}
    assert index.match("f", h(3)) == {A: 1, B: 1}
    assert (index.stats().num_entries, index.stats().num_evicted) == (4, 2)
    index.apply(kv(A, 2, Removed(hashes=h(1))))
    index.check()


@dataclass
class FakeWorker:
    """Knows the truth and numbers its messages; the wire below may lose or repeat them."""

    incarnation: Incarnation
    truth: set[BlockHash] = field(default_factory=set)
    seq: int = 0

    def say(self, *events: Stored | Removed | Cleared) -> KvEvents:
        self.seq += 1
        return kv(self.incarnation, self.seq, *events)

    def resend(self) -> KvEvents:
        return self.say(Cleared(), Stored(hashes=tuple(self.truth)))


class IndexMachine(RuleBasedStateMachine):
    """Workers change, messages are lost and repeated, workers and the index restart. Whenever a worker is in step, and
    always after all resends, what the index says is the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(10_000)
        self.lives = 0
        self.workers: list[FakeWorker] = [self._new() for _ in range(3)]
        self.wire: list[KvEvents] = []
        self.delivered: list[KvEvents] = []

    def _new(self) -> FakeWorker:
        self.lives += 1
        return FakeWorker(Incarnation(f"life{self.lives}"))

    which = st.integers(0, 2)
    numbers = st.frozensets(st.integers(0, 7), min_size=1, max_size=4)

    def _send(self, message: KvEvents, is_lost: bool) -> None:
        if not is_lost:
            self.wire.append(message)

    @rule(w=which, numbers=numbers, is_lost=st.booleans())
    def store(self, w: int, numbers: frozenset[int], is_lost: bool) -> None:
        self.workers[w].truth |= set(h(*numbers))
        self._send(self.workers[w].say(Stored(hashes=h(*numbers))), is_lost)

    @rule(w=which, numbers=numbers, is_lost=st.booleans())
    def remove(self, w: int, numbers: frozenset[int], is_lost: bool) -> None:
        gone = self.workers[w].truth & set(h(*numbers))
        self.workers[w].truth -= gone
        self._send(self.workers[w].say(Removed(hashes=tuple(gone))), is_lost)

    @rule(w=which, is_lost=st.booleans())
    def clear(self, w: int, is_lost: bool) -> None:
        self.workers[w].truth.clear()
        self._send(self.workers[w].say(Cleared()), is_lost)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A message that has arrived arrives again."""
        self.index.apply(self.delivered[data.draw(st.integers(0, len(self.delivered) - 1))])

    @rule(count=st.integers(1, 6), is_lost=st.booleans())
    def deliver(self, count: int, is_lost: bool) -> None:
        """Some messages arrive; who is asked to resend does so, over the same wire."""
        self.delivered += self.wire[:count]
        for message in self.wire[:count]:
            if not self.index.apply(message):
                for worker in self.workers:
                    if worker.incarnation == message.incarnation:
                        self._send(worker.resend(), is_lost)
        del self.wire[:count]

    @rule(w=which)
    def worker_restarts(self, w: int) -> None:
        self.index.forget(self.workers[w].incarnation)
        self.workers[w] = self._new()

    @rule()
    def index_restarts(self) -> None:
        self.index = PrefixIndex(10_000)
        for worker in self.workers:
            self.index.expect(worker.incarnation, "f")
            self._send(worker.resend(), False)

    @rule()
    def all_is_quiet(self) -> None:
        """Everything arrives, the unsure are asked again, the silent say their word, and who is not in the roster is
        forgotten (the index may have missed a death while it was away): index = truth."""
        for message in self.wire:
            self.index.apply(message)
        self.wire.clear()
        for worker in self.workers:
            self.index.apply(worker.say())  # shows a hole, if there is one
            if worker.incarnation in self.index.unsure():
                assert self.index.apply(worker.resend())
        for incarnation in set(self.index.incarnations()) - {w.incarnation for w in self.workers}:
            self.index.forget(incarnation)
        assert self.index.unsure() == []
        truth = {w.incarnation: w.truth for w in self.workers}
        for number in range(8):
            want = {incarnation: 1 for incarnation, held in truth.items() if h(number)[0] in held}
            assert self.index.match("f", h(number)) == want
        assert self.index.match("f", h(*range(8))) == longest_runs(truth, h(*range(8)))

    @invariant()
    def both_directions_agree(self) -> None:
        self.index.check()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("bound", [1, 3, 64, 100])
def test_the_bound_holds_whatever_comes(bound: int) -> None:
    """Many blocks from several workers never exceed max_blocks."""
    index = PrefixIndex(bound)
    for seq in range(1, 20):
        for worker in range(4):
            index.apply(kv(Incarnation(str(worker)), seq, Stored(hashes=h(*range(seq * 5, seq * 5 + 8)))))
            index.check()
