"""Which rows run next. The life of a seq here stands in `seq.py`, that of a block in `block_pool.py`.

`plan()` gives out blocks and rows, `commit()` moves the seqs on by what the runner answered; between the two, blocks
that the plan names stay where they are. One more plan may be made while one is in flight, so that the next step begins
as soon as this one ends: its decode rows have tokens that are `PENDING`, and it takes nothing from anybody.

Decode rows go first, then chunks of prompts, then new seqs from the waiting line, all in order of rank: priority, then
arrival, where a level of priority is worth a number of arrivals (`seq.py`).

Every seq ends as long as one fits the pool alone: a running seq that needs a block takes it from the last in rank, so
the eldest always goes on; nothing takes blocks from the eldest, and no reservation passes the head of the waiting
line unless the head would still fit (`rationing.py`).
"""

from collections import Counter, deque

from services.engine.block_pool import BlockPool
from services.engine.forking import Forking
from services.engine.parking import Parking
from services.engine.progress import Progress
from services.engine.rationing import Rationing
from services.engine.roster import Roster
from services.engine.seating import PlannerLimits, Seating
from services.engine.seq import Seq, SeqState, ends_with
from services.engine.seq_blocks import SeqBlocks
from services.engine.types import (
    PENDING,
    BayId,
    EngineStats,
    Move,
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


class Planner:
    """Pure: no clock, no await, no tensor. Two plans are in flight at most."""

    def __init__(self, pool: BlockPool, limits: PlannerLimits, parking: Parking | None = None) -> None:
        assert limits.max_num_seqs > 0
        assert limits.max_num_batched_tokens > 0
        assert 0 < limits.max_model_len <= pool.total * pool.block_size, "one seq must fit the pool alone"
        self._pool = pool
        self._limits = limits
        self._roster = Roster()
        self._blocks = SeqBlocks(pool, prefix_caching=limits.prefix_caching)
        self._parking = parking or Parking(0)
        self._forking = Forking(pool, self._roster, limits.max_model_len)
        self._progress = Progress(
            *(pool, self._blocks, self._parking, self._roster, self._forking, limits.max_model_len),
        )
        self._rationing = Rationing(pool, self._blocks, self._roster, limits.max_model_len)
        self._seating = Seating(
            *(limits, self._roster, self._blocks, self._rationing, self._parking, self._forking, self._progress),
        )
        self._flights: deque[StepPlan] = deque()
        self._wants_quiet = False  # nothing is planned ahead until nothing is in flight
        self._step = 0
        self._preemptions_told = 0  # in step outputs

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def has_work(self) -> bool:
        """Whether a seq waits or runs (`plan` may still find nothing that fits)."""
        return bool(self._roster.waiting or self._roster.running)

    @property
    def wants_quiet(self) -> bool:
        """Somebody waits until nothing is in flight: first ask again for what could not be reserved, then plan."""
        return self._wants_quiet

    # --- seqs come and go: legal at any time, also while a plan is in flight ------------------------

    def add(self, spec: SeqSpec) -> None:
        """A new seq, at the end of the waiting line of its priority. It must not have ended already
        (`finish_reason`), and its id must be new."""
        self._roster.enter(self._make(spec))

    def reserve(self, spec: SeqSpec) -> Reservation | None:
        """Blocks for a prompt whose KV another worker sends, hits pinned; None, and no change, if they cannot be had
        now. While steps are in flight their seqs keep their blocks: ask again after each step; after the next one
        nothing is in flight.

        A spec within its credit takes back what running seqs have beyond theirs; any spec takes from running seqs
        of lower priority. The reserved blocks stay untouched until `land` or `drop`.
        """
        assert not spec.prefill_only
        seq = self._make(spec)
        quote = self._blocks.quote(seq, len(seq.tokens))
        victims = self._rationing.to_reserve(seq, quote)
        if victims is None:
            self._wants_quiet = bool(self._flights)
            return None
        for victim in victims:
            self._seating.preempt(victim)
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
        seq.num_computed = seq.num_planned = seq.high_water = len(seq.tokens)
        self._blocks.fill(seq)
        seq.num_cached_tokens = first.num_cached_tokens
        self._roster.move(seq, SeqState.RUNNING)
        if seq.spec.siblings:
            self._forking.fork(seq, first.others)
        seq.prompt_logprobs = None
        seq.tokens.append(first.token_id)
        if self._reason(seq) is not None:
            assert seq.spec.siblings, f"seq {seq_id} ended with its first token"
            self._progress.retire(seq)
        return True

    def drop(self, seq_id: SeqId) -> None:
        """A reservation is not wanted any more, and no byte can move into its blocks any more. Idempotent."""
        seq = self._roster.get(seq_id)
        if seq is None:
            return
        landing = seq.table[seq.num_hit_blocks :]
        if seq.state is SeqState.ABORTED:
            if not seq.num_flights:  # else it is a running seq that was aborted: commit's business
                self._pool.end_quarantine(landing)
                self._roster.forget(seq)
            return
        assert seq.state is SeqState.LANDING, f"seq {seq_id} is {seq.state.value}"
        self._pool.end_landing(landing)
        self._progress.retire(seq)

    def abort(self, seq_id: SeqId) -> None:
        """End a seq in whatever state; nothing is reported of it from now on. Idempotent. Blocks go back at once, or
        at commit if a step is using them, or at `drop` if a transfer may be writing them."""
        seq = self._roster.get(seq_id)
        if seq is None or seq.state is SeqState.ABORTED:
            return
        if seq.state is SeqState.LANDING:
            self._blocks.quarantine(seq)
            self._roster.move(seq, SeqState.ABORTED)
        else:
            self._progress.end(seq)

    def release(self, seq_id: SeqId) -> None:
        """The reader of a handed-off seq is done: full blocks become cached, the partial one free. Idempotent."""
        seq = self._roster.get(seq_id)
        if seq is None:
            return
        assert seq.state is SeqState.HANDING_OFF, f"seq {seq_id} is {seq.state.value}"
        self._progress.retire(seq)

    # --- a step -------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run. Each plan is followed by its `commit`, `fail` or `skip`, in
        order.

        Ahead, while another plan is in flight, None means only: not now, ask when nothing is.
        """
        ahead = bool(self._flights)
        if ahead and not self._may_look_ahead():
            return None
        draft = self._seating.draft(ahead)
        if draft.is_short or not draft.rows:
            return None
        self._wants_quiet = False
        self._step += 1
        digests = self._progress.blocks_to_digest(draft.rows)
        items = tuple(self._item(seq, num_rows) for seq, num_rows in draft.rows.items())
        after = self._flights[-1].step if ahead else 0
        plan = StepPlan(
            *(self._step, items, self._parking.take_moves(), tuple(draft.restores), tuple(draft.copies)),
            digest_blocks=digests,
            after=after,
        )
        self._flights.append(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Move the seqs of the eldest plan in flight on. `result` must be aligned with it (`check_result`)."""
        self._land_plan(plan)
        return self._progress.apply(plan, result, self._take_num_preempted())

    def fail(self, plan: StepPlan, reason: str) -> StepOutput:
        """The runner could not run the eldest plan in flight: its seqs are gone, and what they wrote is forgotten."""
        self._land_plan(plan)
        failed = self._progress.fail(plan, reason)
        self._wants_quiet = bool(self._flights)  # the next one may be skipped: nothing can be built on it
        return StepOutput(failed=failed, kv_events=self._pool.drain_events(), num_preempted=self._take_num_preempted())

    def skip(self, plan: StepPlan) -> StepOutput:
        """The runner has not begun the eldest plan in flight, as it waits for tokens of a step that failed: its other
        seqs will be planned again."""
        self._land_plan(plan)
        assert not self._flights, "a plan was built on one that is skipped"
        self._progress.skip(plan)
        return StepOutput(kv_events=self._pool.drain_events(), num_preempted=self._take_num_preempted())

    def take_moves(self) -> tuple[Move, ...]:
        """Copies to host memory that no plan carries yet: to be made before a transfer writes into reserved blocks."""
        return self._parking.take_moves()

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
            preemptions=self._seating.preemptions,
            prompt_tokens_computed=counts.prompt_tokens_computed,
            prompt_tokens_cached=counts.prompt_tokens_cached,
            output_tokens=counts.output_tokens,
            steps=self._step,
            queued_tokens=queued,
            extra={
                "tokens_recomputed": float(counts.tokens_recomputed),
                "blocks_promised": float(pool.promised),
                "preemptions_parked": float(self._parking.num_parked),
                "preemptions_recomputed": float(self._parking.num_refused),
                "blocks_parked": float(self._parking.num_used),
                "stalls": float(self._seating.stalls),
            },
        )

    def check(self) -> None:
        """Assert that the lines, the tables and the pool tell the same story. Costs time: for tests and idling."""
        pool, size = self._pool, self._pool.block_size
        census = pool.check()
        self._roster.check()
        flights = Counter(item.seq_id for plan in self._flights for item in plan.items)
        holders = [0] * pool.total
        pinned: set[BlockId] = set()
        bays: list[BayId] = []
        num_landing = num_quarantined = promised = 0
        for seq in self._roster:
            table, promised = seq.table, promised + seq.promised
            assert seq.num_flights == flights[seq.spec.seq_id]
            assert seq.num_computed <= seq.num_planned <= len(table) * size
            bays += seq.parked
            if seq.state is SeqState.ABORTED and not seq.num_flights:
                num_quarantined += len(table)
                continue
            if seq.state is SeqState.LANDING:
                num_landing += len(table) - seq.num_hit_blocks
            for block in table:
                holders[block] += 1
            if seq.num_announced:
                pinned.update(table[: seq.num_announced])
        for block in self._forking.copied:
            holders[block] += 1
        assert holders == pool.all_refs()
        assert pool.promised == promised
        assert census["landing"] == num_landing
        assert census["quarantined"] == num_quarantined
        assert census["pinned"] == len(pinned)
        self._parking.check(bays)

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

    def _may_look_ahead(self) -> bool:
        """Whether the next step can be planned before this one's tokens are known."""
        if not self._limits.look_ahead or self._wants_quiet or len(self._flights) > 1:
            return False
        return all(seq.is_plain or not seq.num_pending for seq in self._roster.running)

    def _item(self, seq: Seq, num_rows: int) -> PlanItem:
        """The seq's rows as the runner wants them. Mutates what the seq has in flight."""
        start, sample, spec = seq.num_planned, None, seq.spec
        tokens = tuple(seq.tokens[start : start + num_rows]) or (PENDING,)
        if num_rows == seq.num_remaining:
            position = len(seq.tokens) + seq.num_pending
            sample = SampleSpec(
                *(spec.sampling, spec.choice, position, seq.tokens, spec.num_prompt_tokens, seq.num_first_tokens)
            )
            seq.num_pending += 1
        seq.num_planned += num_rows
        seq.num_flights += 1
        if seq.prompt_logprobs is None:
            return PlanItem(spec.seq_id, tokens, start, seq.table, sample)
        targets = tuple(seq.tokens[start + 1 : start + 1 + num_rows])
        return PlanItem(spec.seq_id, tokens, start, seq.table, sample, targets, spec.sampling.prompt_logprobs or 0)

    def _land_plan(self, plan: StepPlan) -> None:
        assert self._flights, "no plan in flight"
        assert plan is self._flights.popleft(), "not the eldest plan in flight"
        if plan.copies:
            self._forking.release_copied()

    def _take_num_preempted(self) -> int:
        told, self._preemptions_told = self._preemptions_told, self._seating.preemptions
        return self._preemptions_told - told
