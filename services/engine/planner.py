"""Which rows run next. The life of a seq here stands in `seq.py`, that of a block in `block_pool.py`.

`plan()` gives out blocks and rows, `commit()` moves the seqs on by what the runner answered; between the two, blocks
that the plan names stay where they are. Decode rows go first, then chunks of prompts, then new seqs from the waiting
line, all in order of rank: priority, then arrival, where a level of priority is worth a number of arrivals (`seq.py`).

Every seq ends as long as one fits the pool alone: a running seq that needs a block takes it from the last in rank, so
the eldest always goes on; nothing takes blocks from the eldest, and no reservation passes the head of the waiting
line unless the head would still fit (`rationing.py`).
"""

from collections import Counter
from dataclasses import dataclass, field

from services.engine.block_pool import BlockPool
from services.engine.forking import Forking
from services.engine.progress import Progress
from services.engine.rationing import Rationing
from services.engine.roster import Roster
from services.engine.seq import Seq, SeqState, ends_with
from services.engine.seq_blocks import SeqBlocks
from services.engine.types import (
    EngineStats,
    PlanItem,
    Reservation,
    SampleSpec,
    SeqId,
    SeqSpec,
    StepOutput,
    StepPlan,
    StepResult,
)
from shared.ids import BlockHash, BlockId
from shared.messages import FirstToken, Removed, Stored

MAX_TOLD_ROWS = 128
"""Rows of one seq and step if logprobs of its prompt are wanted, as all their logits are kept: 25 MB at 49k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLimits:
    """`max_model_len` is in tokens, prompt and output; it must fit the pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_caching: bool = True


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    seats: int
    tokens_left: int
    rows: dict[Seq, int] = field(default_factory=dict)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)

    def give(self, seq: Seq) -> None:
        """As many rows as the seq wants and the budget has."""
        num_rows = min(seq.num_remaining, self.tokens_left)
        if seq.prompt_logprobs is not None:
            num_rows = min(num_rows, MAX_TOLD_ROWS)
        self.rows[seq] = num_rows
        self.tokens_left -= num_rows

    def take_back(self, seq: Seq) -> None:
        self.tokens_left += self.rows.pop(seq, 0)


class Planner:
    """Pure: no clock, no await, no tensor. One plan is in flight at most."""

    def __init__(self, pool: BlockPool, limits: PlannerLimits) -> None:
        assert limits.max_num_seqs > 0
        assert limits.max_num_batched_tokens > 0
        assert 0 < limits.max_model_len <= pool.total * pool.block_size, "one seq must fit the pool alone"
        self._pool = pool
        self._limits = limits
        self._roster = Roster()
        self._blocks = SeqBlocks(pool, prefix_caching=limits.prefix_caching)
        self._forking = Forking(pool, self._roster, limits.max_model_len)
        self._progress = Progress(pool, self._blocks, self._roster, self._forking, limits.max_model_len)
        self._rationing = Rationing(pool, self._blocks, self._roster, limits.max_model_len)
        self._in_flight: StepPlan | None = None
        self._in_flight_ids: frozenset[SeqId] = frozenset()
        self._step = 0
        self._num_preempted = 0  # since the last step output
        self._preemptions = 0

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def has_work(self) -> bool:
        """Whether a seq waits or runs (`plan` may still find nothing that fits)."""
        return bool(self._roster.waiting or self._roster.running)

    # --- seqs come and go: legal at any time, also while a plan is in flight ------------------------

    def add(self, spec: SeqSpec) -> None:
        """A new seq, at the end of the waiting line of its priority. It must not have ended already
        (`finish_reason`), and its id must be new."""
        self._roster.enter(self._make(spec))

    def reserve(self, spec: SeqSpec) -> Reservation | None:
        """Blocks for a prompt whose KV another worker sends, hits pinned; None, and no change, if they cannot be had
        now. While a step is in flight its seqs keep their blocks: ask again after the step.

        A spec within its credit takes back what running seqs have beyond theirs; any spec takes from running seqs
        of lower priority. The reserved blocks stay untouched until `land` or `drop`.
        """
        assert not spec.prefill_only
        seq = self._make(spec)
        quote = self._blocks.quote(seq, len(seq.tokens))
        victims = self._rationing.to_reserve(seq, quote, self._in_flight_ids)
        if victims is None:
            return None
        for victim in victims:
            self._preempt(victim)
        landing = self._blocks.acquire(seq, quote)
        seq.credit = max(0, seq.credit - seq.num_shared)
        self._pool.begin_landing(landing)
        seq.state, seq.admitted = SeqState.LANDING, True
        self._roster.enter(seq)
        return Reservation(spec.seq_id, seq.table, len(quote.hits), seq.num_shared)

    def land(self, seq_id: SeqId, first: FirstToken) -> bool:
        """The reserved blocks hold the prompt's KV: the seq runs, its first token known, and so do its siblings. The
        tokens are not reported again, and must not end all of them (then the caller drops the seq instead). False if
        the seq was aborted meanwhile: its blocks are given back."""
        seq = self._roster.get(seq_id)
        if seq is None or seq.state is SeqState.ABORTED:
            self.drop(seq_id)
            return False
        assert seq.state is SeqState.LANDING, f"seq {seq_id} is {seq.state.value}"
        assert first.index == seq.num_output, f"seq {seq_id}: first token {first.index}, expected {seq.num_output}"
        self._pool.end_landing(seq.table[seq.num_hit_blocks :])
        seq.num_computed = seq.high_water = len(seq.tokens)
        self._blocks.fill(seq, seq.num_hit_blocks, seq.num_computed // self._pool.block_size)
        seq.num_cached_tokens = first.num_cached_tokens
        self._roster.move(seq, SeqState.RUNNING)
        if seq.spec.siblings:
            self._forking.fork(seq, first.others)
        seq.prompt_logprobs = None
        seq.tokens.append(first.token_id)
        if self._reason(seq) is not None:
            assert seq.spec.siblings, f"seq {seq_id} ended with its first token"
            self._retire(seq)
        return True

    def drop(self, seq_id: SeqId) -> None:
        """A reservation is not wanted any more, and no byte can move into its blocks any more. Idempotent."""
        seq = self._roster.get(seq_id)
        if seq is None:
            return
        landing = seq.table[seq.num_hit_blocks :]
        if seq.state is SeqState.ABORTED:
            if seq_id not in self._in_flight_ids:  # else it is a running seq that was aborted: commit's business
                self._pool.end_quarantine(landing)
                self._roster.forget(seq)
            return
        assert seq.state is SeqState.LANDING, f"seq {seq_id} is {seq.state.value}"
        self._pool.end_landing(landing)
        self._retire(seq)

    def abort(self, seq_id: SeqId) -> None:
        """End a seq in whatever state; nothing is reported of it from now on. Idempotent. Blocks go back at once, or
        at commit if a step is using them, or at `drop` if a transfer may be writing them."""
        seq = self._roster.get(seq_id)
        if seq is None or seq.state is SeqState.ABORTED:
            return
        if seq.state is SeqState.LANDING:
            self._blocks.quarantine(seq)
            self._roster.move(seq, SeqState.ABORTED)
        elif seq_id in self._in_flight_ids:
            self._roster.move(seq, SeqState.ABORTED)
        else:
            self._retire(seq)

    def release(self, seq_id: SeqId) -> None:
        """The reader of a handed-off seq is done: full blocks become cached, the partial one free. Idempotent."""
        seq = self._roster.get(seq_id)
        if seq is None:
            return
        assert seq.state is SeqState.HANDING_OFF, f"seq {seq_id} is {seq.state.value}"
        self._retire(seq)

    # --- a step -------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run. Must be followed by `commit` or `fail`."""
        assert self._in_flight is None, "the last plan is still in flight"
        limits = self._limits
        draft = _Draft(min(limits.max_num_seqs, limits.max_num_batched_tokens), limits.max_num_batched_tokens)
        self._plan_running(draft)
        self._admit(draft)
        if not draft.rows:
            return None
        self._step += 1
        items = tuple(self._item(seq, num_rows) for seq, num_rows in draft.rows.items())
        digest_blocks = self._progress.blocks_to_digest(draft.rows)
        plan = StepPlan(self._step, items, copies=tuple(draft.copies), digest_blocks=digest_blocks)
        self._in_flight = plan
        self._in_flight_ids = frozenset(item.seq_id for item in items)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Move the seqs of the plan on. `result` must be aligned with the plan (`check_result`)."""
        self._land_plan(plan)
        return self._progress.apply(plan, result, self._take_num_preempted())

    def fail(self, plan: StepPlan, reason: str) -> StepOutput:
        """The runner could not run the plan: its seqs are gone, and what they wrote is forgotten."""
        self._land_plan(plan)
        failed: list[tuple[SeqId, str]] = []
        for item in plan.items:
            seq = self._roster.get(item.seq_id)
            assert seq is not None
            if seq.state is not SeqState.ABORTED:
                failed.append((item.seq_id, reason))
            self._retire(seq)
        return StepOutput(
            failed=tuple(failed), kv_events=self._pool.drain_events(), num_preempted=self._take_num_preempted()
        )

    def drain_events(self) -> tuple[Stored | Removed, ...]:
        """Cache changes that no step has reported yet."""
        return self._pool.drain_events()

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        """Hashes of all blocks that a prefix can hit now."""
        return self._pool.hashes()

    def stats(self) -> EngineStats:
        roster, pool = self._roster, self._pool
        states = Counter(seq.state for seq in roster)
        queued = sum(max(0, len(seq.spec.token_ids) - seq.num_computed) for seq in (*roster.waiting, *roster.running))
        counts = self._progress.counts
        return EngineStats(
            num_waiting=len(roster.waiting),
            num_running=len(roster.running),
            num_landing=states[SeqState.LANDING],
            num_pinned_seqs=states[SeqState.HANDING_OFF],
            blocks_total=pool.total,
            blocks_free=pool.takeable,
            blocks_cached=pool.num_cached,
            preemptions=self._preemptions,
            prompt_tokens_computed=counts.prompt_tokens_computed,
            prompt_tokens_cached=counts.prompt_tokens_cached,
            output_tokens=counts.output_tokens,
            steps=self._step,
            queued_tokens=queued,
            extra={"tokens_recomputed": float(counts.tokens_recomputed), "blocks_promised": float(pool.promised)},
        )

    def check(self) -> None:
        """Assert that the lines, the tables and the pool tell the same story. Costs time: for tests and idling."""
        self._pool.check()
        self._roster.check()
        holders: Counter[BlockId] = Counter()
        pinned: set[BlockId] = set()
        num_landing = num_quarantined = 0
        for seq in self._roster:
            quarantined = seq.state is SeqState.ABORTED and seq.spec.seq_id not in self._in_flight_ids
            num_quarantined += seq.table_len if quarantined else 0
            num_landing += seq.table_len - seq.num_hit_blocks if seq.state is SeqState.LANDING else 0
            holders.update(() if quarantined else seq.table)
            pinned.update(seq.table[: seq.num_announced])
            assert seq.num_computed <= seq.table_len * self._pool.block_size
        holders.update(self._forking.copied)
        census = self._pool.census()
        assert all(self._pool.refs(BlockId(b)) == holders[BlockId(b)] for b in range(self._pool.total))
        assert self._pool.promised == sum(seq.promised for seq in self._roster)
        assert census["landing"] == num_landing
        assert census["quarantined"] == num_quarantined
        assert census["pinned"] == len(pinned)

    # --- inside -------------------------------------------------------------------------------------

    def _make(self, spec: SeqSpec) -> Seq:
        size = self._pool.block_size
        assert 0 < spec.num_prompt_tokens <= len(spec.token_ids)
        assert len(spec.block_hashes) == spec.num_prompt_tokens // size, "hashes of another block size"
        assert self._roster.get(spec.seq_id) is None, f"seq {spec.seq_id} is known already"
        seq = Seq(spec, self._roster.next_arrival(1 + len(spec.siblings)), size, spec.credit_blocks)
        assert self._reason(seq) is None, f"seq {spec.seq_id} has ended already"
        return seq

    def _reason(self, seq: Seq) -> str | None:
        last = seq.tokens[-1] if seq.num_output else None
        return ends_with(seq.spec.sampling, last, seq.num_output, len(seq.tokens), self._limits.max_model_len)

    def _plan_running(self, draft: _Draft) -> None:
        """Rows for seqs that have blocks already: one-row (decode) seqs first, then chunks. Only the first `seats`
        in rank get any, so that a long prompt among many short answers still gets its turn."""
        seated = self._roster.running[: draft.seats]
        for seq in seated:
            if not draft.tokens_left:
                return
            if seq.state is SeqState.RUNNING and seq.num_remaining == 1 and self._has_slot(seq):
                if seq.shares_tail and not self._owns_tail(seq, draft):
                    continue
                draft.give(seq)
        for seq in seated:
            if not draft.tokens_left:
                return
            if seq.state is SeqState.RUNNING and seq.num_remaining > 1:
                draft.give(seq)

    def _has_slot(self, seq: Seq) -> bool:
        """Whether the seq's table covers all its tokens, if need be at the cost of seqs behind it in rank. (Those have
        no rows yet in this step, so no planned row is lost.)"""
        while seq.table_len < seq.num_blocks:
            if self._blocks.grow(seq):
                continue
            victim = self._rationing.victim(seq)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _owns_tail(self, seq: Seq, draft: _Draft) -> bool:
        """Whether nobody else will see what the seq writes into its last block, if need be at the cost of seqs behind
        it in rank, as in `_has_slot`."""
        while True:
            copy = self._forking.own_tail(seq)
            if not seq.shares_tail:
                draft.copies += [copy] if copy else []
                return True
            victim = self._rationing.victim(seq)
            if victim is None:
                return False
            self._preempt(victim)

    def _admit(self, draft: _Draft) -> None:
        """Start waiting seqs in order until one does not fit."""
        roster = self._roster
        while roster.waiting and len(roster.running) < draft.seats and draft.tokens_left:
            seq = roster.waiting[0]
            quote = self._blocks.quote(seq, seq.max_hit_tokens)
            victims = self._rationing.to_start(quote)
            if victims is None:
                return
            for victim in victims:
                draft.take_back(victim)
                self._preempt(victim)
            self._blocks.acquire(seq, quote)
            self._progress.start_from_hits(seq)
            roster.move(seq, SeqState.RUNNING)
            draft.give(seq)

    def _preempt(self, seq: Seq) -> None:
        assert seq.spec.seq_id not in self._in_flight_ids
        self._blocks.surrender(seq)
        self._roster.move(seq, SeqState.PREEMPTED)
        self._num_preempted += 1
        self._preemptions += 1

    def _retire(self, seq: Seq) -> None:
        self._blocks.surrender(seq)
        self._roster.forget(seq)

    def _item(self, seq: Seq, num_rows: int) -> PlanItem:
        start, sample = seq.num_computed, None
        if num_rows == seq.num_remaining:
            spec = seq.spec
            sample = SampleSpec(
                spec.sampling,
                spec.choice,
                len(seq.tokens),
                seq.tokens,
                spec.num_prompt_tokens,
                seq.num_first_tokens,
            )
        rows = tuple(seq.tokens[start : start + num_rows])
        if seq.prompt_logprobs is None:
            return PlanItem(seq.spec.seq_id, rows, start, seq.table, sample)
        targets = tuple(seq.tokens[start + 1 : start + 1 + num_rows])
        num_top = seq.spec.sampling.prompt_logprobs or 0
        return PlanItem(seq.spec.seq_id, rows, start, seq.table, sample, targets, num_top)

    def _land_plan(self, plan: StepPlan) -> None:
        assert plan is self._in_flight, "not the plan in flight"
        self._in_flight, self._in_flight_ids = None, frozenset()
        if self._forking.copied:
            self._forking.release_copied()

    def _take_num_preempted(self) -> int:
        taken, self._num_preempted = self._num_preempted, 0
        return taken
