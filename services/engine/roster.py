"""Who is here, in which line, and whose turn comes first."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.engine.seq import Seq, SeqState
from services.engine.types import SeqId


class Roster:
    """All seqs by id, and two lines in order: waiting (preempted ones included) and running."""

    def __init__(self) -> None:
        self._seqs: dict[SeqId, Seq] = {}
        self._waiting: list[Seq] = []
        self._running: list[Seq] = []
        self._arrivals = 0

    @property
    def waiting(self) -> list[Seq]:
        return self._waiting

    @property
    def running(self) -> list[Seq]:
        return self._running

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._seqs.values())

    def __len__(self) -> int:
        return len(self._seqs)

    def get(self, seq_id: SeqId) -> Seq | None:
        return self._seqs.get(seq_id)

    def next_arrival(self, count: int = 1) -> int:
        """The first of so many numbers in a row."""
        first = self._arrivals + 1
        self._arrivals += count
        return first

    def enter(self, seq: Seq) -> None:
        """A new seq, in the line of its state."""
        assert seq.spec.seq_id not in self._seqs, f"seq {seq.spec.seq_id} is known already"
        self._seqs[seq.spec.seq_id] = seq
        self._join(seq)

    def move(self, seq: Seq, state: SeqState) -> None:
        """From the line of its old state to that of its new one."""
        self._leave(seq)
        seq.state = state
        self._join(seq)

    def forget(self, seq: Seq) -> None:
        self._leave(seq)
        del self._seqs[seq.spec.seq_id]

    def eldest(self) -> Seq | None:
        """The first by rank of all that wait or run: nothing takes its blocks, so that it can finish."""
        return min((*self._running[:1], *self._waiting), key=lambda seq: seq.rank, default=None)

    def behind(self, rank: tuple[int, int]) -> Iterator[Seq]:
        """Running seqs after this rank that may be preempted, the last first. Not those in flight."""
        for seq in reversed(self._running):
            if seq.rank <= rank:
                return
            if not seq.spec.prefill_only and not seq.num_flights:
                yield seq

    def over_credit(self) -> Iterator[Seq]:
        """Running seqs that have more than their credit and may be preempted for one that has not, the last first.
        Never the eldest."""
        eldest = self.eldest()
        last_first = eldest and self.behind(eldest.rank)
        return (seq for seq in last_first or () if seq.is_over_credit())

    def check(self) -> None:
        """Assert that the lines are in order and agree with the states."""
        ranks, waiting_ranks = [seq.rank for seq in self._running], [seq.waiting_rank for seq in self._waiting]
        assert ranks == sorted(ranks)
        assert waiting_ranks == sorted(waiting_ranks)
        states = [seq.state for seq in self._seqs.values()]
        assert states.count(SeqState.RUNNING) == len(self._running)
        assert states.count(SeqState.WAITING) + states.count(SeqState.PREEMPTED) == len(self._waiting)
        assert all(seq.state is SeqState.RUNNING for seq in self._running)
        assert all(seq.state in (SeqState.WAITING, SeqState.PREEMPTED) for seq in self._waiting)
        assert all(self._seqs.get(seq.spec.seq_id) is seq for seq in (*self._running, *self._waiting))

    def _join(self, seq: Seq) -> None:
        if seq.state is SeqState.RUNNING:
            insort(self._running, seq, key=lambda other: other.rank)
        elif seq.state in (SeqState.WAITING, SeqState.PREEMPTED):
            insort(self._waiting, seq, key=lambda other: other.waiting_rank)

    def _leave(self, seq: Seq) -> None:
        if seq.state is SeqState.RUNNING:
            at = bisect_left(self._running, seq.rank, key=lambda other: other.rank)
            assert self._running.pop(at) is seq
        elif seq.state in (SeqState.WAITING, SeqState.PREEMPTED):
            at = bisect_left(self._waiting, seq.waiting_rank, key=lambda other: other.waiting_rank)
            assert self._waiting.pop(at) is seq
