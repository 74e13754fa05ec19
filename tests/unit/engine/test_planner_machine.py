"""Planner and pool under random orders of everything that a worker may do, in tiny pools.

The model knows each seq's answer from the fake model's definition alone. After every rule the books must balance;
at the end every seq that nobody aborted has given its whole answer, once, and every block is takeable again.
"""

from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.fake_runner import fake_answer
from services.engine.last_tokens import StepLost
from services.engine.types import Filled, SeqSpec, StepOutput, StepPlan
from shared.ids import BlockId
from shared.messages import FirstToken, Stored
from tests.unit.engine.helpers import BLOCK, Rig, make_spec

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=18) | st.integers(1, 18).map(lambda n: [0] * n)
CREDITS = st.none() | st.integers(-2, 3)  # beyond the blocks that the prompt needs; None: no credit at all
WHICH = st.integers(0, 63)


@dataclass
class Known:
    """What the model knows of one seq."""

    spec: SeqSpec
    answer: tuple[int, ...]  # complete
    got: list[int] = field(default_factory=list)  # from output index `first_index` on
    first_index: int = 0
    phase: str = "active"  # active, landing, quarantined, handed_off, over
    landing: tuple[BlockId, ...] = ()  # reserved blocks without hits
    table: list[BlockId] = field(default_factory=list)  # reserved or announced
    digests: list[bytes] = field(default_factory=list)


class PlannerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 14),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        bays=st.integers(0, 12),
        prompts_until=st.integers(1, 24),
    )
    def begin(self, num_blocks: int, seqs: int, budget: int, caching: bool, bays: int, prompts_until: int) -> None:
        self.rig = Rig(num_blocks, seqs=seqs, budget=budget, caching=caching, bays=bays, prompts_until=prompts_until)
        self.planner = self.rig.planner
        self.known: dict[str, Known] = {}
        self.plans: list[StepPlan] = []  # in flight, the eldest first
        self.aborted_in_flight: set[str] = set()
        self.index: set[bytes] = set()  # what a prefix index would believe
        self.count = 0

    # --- seqs -------------------------------------------------------------------------------------------

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        sent=st.integers(0, 3),
        priority=st.integers(0, 1),
        credit=CREDITS,
        prefill_only=st.booleans(),
        stops=st.booleans(),
    )
    def add(self, prompt, max_tokens, sent, priority, credit, prefill_only, stops) -> None:
        known = self.make(prompt, max_tokens, sent, priority, None if prefill_only else credit, prefill_only, stops)
        if known:
            self.planner.add(known.spec)
            self.known[known.spec.seq_id] = known

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(2, 12),
        sent=st.integers(0, 3),
        priority=st.integers(0, 1),
        credit=CREDITS,
    )
    def reserve(self, prompt, max_tokens, sent, priority, credit) -> None:
        known = self.make(prompt, max_tokens, sent, priority, credit, False, False)
        if known is None or known.first_index + 1 >= len(known.answer):  # its first token would end it
            return
        before = self.books()
        held = self.planner.reserve(known.spec)
        if held is None:
            assert self.books() == before
            return
        self.rig.runner.move(self.planner.take_moves(), ())  # before the transfer begins
        hits = held.num_hit_blocks
        assert len(held.block_ids) == -(-len(known.spec.token_ids) // BLOCK)
        assert self.rig.holds_kv(known.spec.token_ids[: hits * BLOCK], held.block_ids)
        known.phase, known.table, known.landing = "landing", list(held.block_ids), held.block_ids[hits:]
        self.rig.scribble(known.landing)
        self.known[known.spec.seq_id] = known

    @precondition(lambda self: self.in_phase("landing"))
    @rule(which=WHICH)
    def land(self, which) -> None:
        known = self.pick(which, "landing")
        self.land_one(known)

    @precondition(lambda self: self.in_phase("landing", "quarantined"))
    @rule(which=WHICH)
    def drop(self, which) -> None:
        """The transfer failed, after writing whatever it liked."""
        known = self.pick(which, "landing", "quarantined")
        self.rig.scribble(known.landing)
        self.planner.drop(known.spec.seq_id)
        known.phase = "over"

    @precondition(lambda self: self.in_phase("quarantined"))
    @rule(which=WHICH)
    def late_write(self, which) -> None:
        """A transfer whose seq was aborted still writes."""
        self.rig.scribble(self.pick(which, "quarantined").landing)

    @precondition(lambda self: self.in_phase("handed_off"))
    @rule(which=WHICH)
    def release(self, which) -> None:
        self.release_one(self.pick(which, "handed_off"))

    @precondition(lambda self: self.in_phase("active", "landing", "handed_off"))
    @rule(which=WHICH)
    def abort(self, which) -> None:
        known = self.pick(which, "active", "landing", "handed_off")
        self.planner.abort(known.spec.seq_id)
        self.planner.abort(known.spec.seq_id)
        known.phase = "quarantined" if known.phase == "landing" else "over"

    # --- steps ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.plans) < 2)
    @rule()
    def plan_step(self) -> None:
        plan = self.planner.plan()
        if plan is not None:
            self.rig.runner.move(plan.parks, plan.restores)  # nothing else writes those blocks until the plan is run
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self) -> None:
        plan = self.plans.pop(0)
        try:
            result = self.rig.runner.run(plan)
        except StepLost:
            self.take(self.planner.skip(plan))
            return
        out = self.planner.commit(plan, result)
        assert out.num_tokens == plan.num_tokens
        self.take(out)

    @precondition(lambda self: self.plans)
    @rule(luck=st.integers(0, 5))
    def fail(self, luck: int) -> None:
        """Now and then the runner dies, in the middle of its writing or before."""
        if luck > 1:
            return
        plan = self.plans.pop(0)
        if luck:
            with suppress(StepLost):
                self.rig.runner.run(plan)
        self.fail_one(plan)

    def fail_one(self, plan: StepPlan) -> None:
        out = self.planner.fail(plan, "boom")
        alive = {item.seq_id for item in plan.items if self.known[item.seq_id].phase == "active"}
        assert {seq_id for seq_id, _ in out.failed} == alive
        for seq_id in alive:
            self.known[seq_id].phase = "over"
        self.take(out)

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        """As an engine does it: the next plan is made before the last one's result is in."""
        for _ in range(num_steps):
            while len(self.plans) < 2:
                before = len(self.plans)
                self.plan_step()
                if len(self.plans) == before:
                    break
            if not self.plans:
                return
            self.commit()

    # --- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.planner.check()
        stats = self.planner.stats()
        assert stats.num_landing == len(self.in_phase("landing"))
        assert stats.num_pinned_seqs == len(self.in_phase("handed_off"))
        assert stats.num_waiting + stats.num_running == len(self.in_phase("active"))

    @invariant()
    def announced_blocks_keep_their_bytes(self) -> None:
        """Whatever was announced can be read until its seq is released or over."""
        for known in self.known.values():
            if known.spec.prefill_only and known.phase in ("active", "handed_off") and known.table:
                covered = known.spec.token_ids[: len(known.table) * BLOCK]
                assert self.rig.holds_kv(covered, known.table)
                assert [self.rig.runner.digest(block) for block in known.table] == known.digests

    def teardown(self) -> None:
        """Let everything end: each seq does, with its whole answer, and the pool is whole again."""
        if not hasattr(self, "rig"):
            return
        for _ in range(2000):
            if not self.plans and not self.in_phase("active", "landing", "quarantined", "handed_off"):
                break
            if len(self.plans) < 2:
                self.plan_step()
            if self.plans:
                self.commit()
            else:
                self.resolve_one()
            self.planner.check()
        assert not self.in_phase("active", "landing", "quarantined", "handed_off"), "a seq never ends"
        assert self.rig.pool.takeable == self.rig.pool.total
        assert not self.planner.has_work

    # --- the model --------------------------------------------------------------------------------------

    def make(self, prompt, max_tokens, sent, priority, credit, prefill_only, stops) -> Known | None:
        """A seq with its whole answer, or None if such a seq could not exist."""
        room = self.rig.pool.total * BLOCK - len(prompt)
        answer = fake_answer(prompt, min(max_tokens, room))
        stop = (answer[-2],) if stops and len(answer) > 1 else ()
        if stop:
            answer = answer[: answer.index(stop[0]) + 1]
        if sent >= len(answer):
            return None
        self.count += 1
        spec = make_spec(
            str(self.count),
            prompt,
            max_tokens,
            sent=sent,
            stop=stop,
            credit=0 if credit is None else max(0, credit + -(-(len(prompt) + sent) // BLOCK)),
            priority=priority,
            prefill_only=prefill_only,
        )
        return Known(spec, answer, first_index=sent)

    def land_one(self, known: Known) -> None:
        self.rig.write_kv(known.spec.token_ids, known.table, len(known.table) - len(known.landing))
        index = known.first_index
        assert self.planner.land(known.spec.seq_id, FirstToken(index=index, token_id=known.answer[index]))
        known.got, known.phase = [known.answer[index]], "active"

    def release_one(self, known: Known) -> None:
        self.planner.release(known.spec.seq_id)
        known.phase = "over"

    def resolve_one(self) -> None:
        """Nothing can run: then the world outside holds blocks, and lets some go."""
        stuck = self.in_phase("landing", "quarantined", "handed_off")
        assert stuck, "seqs wait, nothing runs, and nobody holds blocks"
        if stuck[0].phase == "handed_off":
            self.release_one(stuck[0])
        elif stuck[0].phase == "landing":
            self.land_one(stuck[0])
        else:
            self.planner.drop(stuck[0].spec.seq_id)
            stuck[0].phase = "over"

    def take(self, out: StepOutput) -> None:
        """Check a step's output against the answers."""
        for event in out.kv_events:
            for digest in event.hashes:
                assert (digest not in self.index) if isinstance(event, Stored) else (digest in self.index)
            (self.index.update if isinstance(event, Stored) else self.index.difference_update)(event.hashes)
        assert self.index == set(self.rig.pool.hashes())
        for seq in out.outputs:
            known = self.known[seq.seq_id]
            assert known.phase == "active"
            assert seq.index == known.first_index + len(known.got)
            known.got += seq.token_ids
            done = known.first_index + len(known.got)
            assert tuple(known.got) == known.answer[known.first_index : done]
            assert bool(seq.finish) == (done == len(known.answer))
            if seq.finish:
                stopped = seq.token_ids[-1] in known.spec.sampling.stop_token_ids
                assert seq.finish == ("stop" if stopped else "length")
                known.phase = "over"
        for filled in out.filled:
            self.take_filled(filled)

    def take_filled(self, filled: Filled) -> None:
        known = self.known[filled.seq_id]
        assert known.phase == "active"
        assert filled.first_block == len(known.table)
        known.table += filled.block_ids
        known.digests += filled.digests
        if filled.last is not None:
            assert len(known.table) == -(-len(known.spec.token_ids) // BLOCK)
            assert filled.last.token_id == known.answer[known.first_index]
            assert filled.last.index == known.first_index
            known.phase = "handed_off"

    def in_phase(self, *phases: str) -> list[Known]:
        return [known for known in self.known.values() if known.phase in phases]

    def pick(self, which: int, *phases: str) -> Known:
        choices = self.in_phase(*phases)
        return choices[which % len(choices)]

    def books(self) -> tuple:
        stats = self.planner.stats()
        return (self.rig.pool.census(), self.rig.pool.promised, stats, self.rig.pool.hashes())


PlannerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
test_planner_machine = PlannerMachine.TestCase
