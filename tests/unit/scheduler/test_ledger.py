"""The ledger against a plain list of what happened."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.scheduler.ledger import Ledger
from services.scheduler.placement import Placement
from shared.ids import BlockCount, Incarnation, RequestId, TokenCount
from shared.roster import WorkerView
from tests.unit.scheduler.cell import registration_of

DECODERS, PREFILLS = ("d0", "d1"), ("p0", "p1")
VIEWS = [WorkerView(registration_of(n, "decode"), True, False, 0) for n in DECODERS]
VIEWS += [WorkerView(registration_of(n, "prefill"), True, False, 0) for n in PREFILLS]


def placement(decode: str, prefill: str | None, uncached: int = 40, credit: int = 3) -> Placement:
    chosen = Incarnation(prefill) if prefill else None
    return Placement(Incarnation(decode), chosen, BlockCount(credit), TokenCount(uncached))


class LedgerMachine(RuleBasedStateMachine):
    """`model`: request -> [epoch, placement, whether prefill is done]."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ledger.refresh(VIEWS)
        self.there = {v.registration.incarnation for v in VIEWS}
        self.model: dict[RequestId, tuple[int, Placement, bool]] = {}

    ids = st.integers(0, 6).map(lambda i: RequestId(f"r{i}"))

    @rule(
        r=ids,
        epoch=st.integers(1, 3),
        d=st.sampled_from(DECODERS),
        p=st.sampled_from((*PREFILLS, None)),
        n=st.integers(1, 99),
    )
    def dispatch(self, r: RequestId, epoch: int, d: str, p: str | None, n: int) -> None:
        self.ledger.take(r, epoch, placement(d, p, n))
        self.ledger.confirm(r, epoch)
        self.model[r] = (epoch, placement(d, p, n), False)

    @rule(r=ids)
    def end(self, r: RequestId) -> None:
        self.ledger.forget(r)
        self.model.pop(r, None)

    @rule(r=ids, epoch=st.integers(1, 4))
    def requeued(self, r: RequestId, epoch: int) -> None:
        self.ledger.forget(r, before_epoch=epoch)
        if r in self.model and self.model[r][0] < epoch:
            del self.model[r]

    @rule(p=st.sampled_from(PREFILLS), lost=st.sets(ids))
    def prefill_is_done(self, p: str, lost: set[RequestId]) -> None:
        """Redis says that the prefill worker holds all its tasks but `lost`."""
        if p not in self.there:
            return
        mine = {r for r, (_, placed, done) in self.model.items() if placed.prefill == p and not done}
        held = [(r, self.model[r][0]) for r in mine - lost]
        self.ledger.reconcile(Incarnation(p), held, self.ledger.num_confirmed)
        for r in mine & lost:
            self.model[r] = (*self.model[r][:2], True)

    @rule(d=st.sampled_from(DECODERS), lost=st.sets(ids))
    def ends_unheard(self, d: str, lost: set[RequestId]) -> None:
        """Redis says that decode holds all its tasks but `lost`: they have ended."""
        if d not in self.there:
            return
        mine = {r for r, (_, placed, _) in self.model.items() if placed.decode == d}
        self.ledger.reconcile(Incarnation(d), [(r, self.model[r][0]) for r in mine - lost], self.ledger.num_confirmed)
        for r in mine & lost:
            del self.model[r]

    @rule(name=st.sampled_from((*DECODERS, *PREFILLS)))
    def bury(self, name: str) -> None:
        self.ledger.bury(Incarnation(name))
        self.there.discard(Incarnation(name))

    @rule()
    def refresh(self) -> None:
        self.ledger.refresh(VIEWS)
        self.there = {v.registration.incarnation for v in VIEWS}

    @invariant()
    def sums_agree(self) -> None:
        """Seqs and prompt tokens of each worker are those of the model."""
        self.ledger.check()
        assert self.ledger.num_in_flight == len(self.model)
        got = {c.incarnation: (c.num_seqs, c.prefill_tokens) for c in self.ledger.candidates()}
        want: dict[Incarnation | None, list[int]] = {name: [0, 0] for name in self.there}
        for _, placed, done in self.model.values():
            if placed.decode in want:
                want[placed.decode][0] += 1
            if placed.prefill in want and not done:
                want[placed.prefill][0] += 1
            computer = None if done else placed.prefill or placed.decode
            if computer in want:
                want[computer][1] += placed.uncached_tokens
        assert got == {name: tuple(sums) for name, sums in want.items()}


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_credit_is_redis_word_plus_what_was_dispatched_since() -> None:
    """A refresh replaces the sum; dispatches after it are added."""
    ledger = Ledger()
    ledger.refresh([WorkerView(registration_of("d0", "decode"), True, False, 10)])
    ledger.take(RequestId("a"), 1, placement("d0", None, credit=7))
    assert ledger.candidates()[0].free_blocks == 83
    ledger.refresh([WorkerView(registration_of("d0", "decode"), True, False, 17)])
    assert ledger.candidates()[0].free_blocks == 83


def test_dead_and_draining_workers_are_no_candidates() -> None:
    """They get nothing, and are still known by name."""
    ledger = Ledger()
    ledger.refresh([WorkerView(registration_of("d0", "decode"), False, False, 0), VIEWS[1], VIEWS[2]])
    assert [c.incarnation for c in ledger.candidates()] == ["d1", "p0"]
    ledger.drain(Incarnation("p0"))
    assert [c.incarnation for c in ledger.candidates()] == ["d1"]
    assert ledger.num_workers == 1
    ledger.refresh([WorkerView(registration_of("d1", "decode"), True, True, 0)])
    assert ledger.candidates() == []


def test_reconcile_does_not_judge_a_dispatch_under_way() -> None:
    """What Redis had not written, or had written after the look, is not taken for ended."""
    ledger = Ledger()
    ledger.refresh(VIEWS)
    ledger.take(RequestId("open"), 1, placement("d0", "p0"))
    moment = ledger.num_confirmed
    ledger.take(RequestId("later"), 1, placement("d0", "p0"))
    ledger.confirm(RequestId("later"), 1)
    ledger.reconcile(Incarnation("d0"), [], moment)
    ledger.reconcile(Incarnation("p0"), [], moment)
    assert ledger.epoch_of(RequestId("open")) == 1
    assert ledger.epoch_of(RequestId("later")) == 1
    assert [c.num_seqs for c in ledger.candidates() if c.incarnation == "p0"] == [2]


def test_what_an_earlier_scheduler_dispatched_counts() -> None:
    """Tasks that a worker holds and this ledger does not know are load, until they go."""
    ledger = Ledger()
    ledger.refresh(VIEWS)
    ledger.reconcile(Incarnation("d0"), [(RequestId("x"), 1), (RequestId("y"), 2)], 0)
    assert ledger.candidates()[0].num_seqs == 2
    ledger.reconcile(Incarnation("d0"), [(RequestId("y"), 2)], 0)
    assert ledger.candidates()[0].num_seqs == 1
