"""Who gets rows in the next step, and blocks for them. The first half of `plan()`."""

from dataclasses import dataclass, field

from services.engine.forking import Forking
from services.engine.parking import Parking
from services.engine.progress import Progress
from services.engine.rationing import Rationing
from services.engine.roster import Roster
from services.engine.seq import Seq, SeqState
from services.engine.seq_blocks import SeqBlocks
from services.engine.types import Move
from shared.ids import BlockId

MAX_TOLD_ROWS = 128
"""Rows of one seq and step if logprobs of its prompt are wanted, as all their logits are kept: 25 MB at 49k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLimits:
    """`max_model_len` is in tokens, prompt and output; it must fit the pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_batch_tokens: int = 1 << 30
    """Prompts join a step until it has so many of their tokens; the next prompt waits for the next step. Above what
    keeps the kernels busy, more prompts in a step give no throughput and keep the first one's token back."""
    prefix_caching: bool = True
    look_ahead: bool = True  # plan while a plan is in flight


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    seats: int
    tokens_left: int
    prompts_until: int  # `PlannerLimits.prefill_batch_tokens`
    prompt_tokens: int = 0
    rows: dict[Seq, int] = field(default_factory=dict)
    restores: list[Move] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    is_short: bool = False  # a plan ahead: somebody has a right to blocks that only preemption can give

    @property
    def takes_prompts(self) -> bool:
        """Whether one more seq may get the rows of a prompt."""
        return self.tokens_left > 0 and self.prompt_tokens < self.prompts_until

    def give(self, seq: Seq) -> None:
        """As many rows as the seq wants and the budget has."""
        num_rows = min(seq.num_remaining, self.tokens_left)
        if seq.prompt_logprobs is not None:
            num_rows = min(num_rows, MAX_TOLD_ROWS)
        self.rows[seq] = num_rows
        self.tokens_left -= num_rows
        self.prompt_tokens += num_rows if num_rows > 1 else 0

    def take_back(self, seq: Seq) -> None:
        num_rows = self.rows.pop(seq, 0)
        self.tokens_left += num_rows
        self.prompt_tokens -= num_rows if num_rows > 1 else 0


class Seating:
    """Mutates seqs, roster and pool: whoever gets rows gets the blocks for them."""

    def __init__(
        self,
        limits: PlannerLimits,
        roster: Roster,
        blocks: SeqBlocks,
        rationing: Rationing,
        parking: Parking,
        forking: Forking,
        progress: Progress,
    ) -> None:
        self._limits, self._roster, self._blocks = limits, roster, blocks
        self._rationing, self._parking, self._progress = rationing, parking, progress
        self._forking = forking
        self.preemptions = 0
        self.stalls = 0  # steps without a row for the eldest, because all blocks were out of reach

    def draft(self, ahead: bool) -> Draft:
        """The rows of the next step. Ahead of a step in flight nobody is preempted; where that would be somebody's
        right the draft `is_short`, and void."""
        limits = self._limits
        budget = limits.max_num_batched_tokens
        draft = Draft(min(limits.max_num_seqs, budget), budget, limits.prefill_batch_tokens)
        self._seat_running(draft, ahead)
        if not draft.is_short:
            self._admit(draft, ahead)
        if not draft.rows and not ahead:
            self._go_on(draft)
        return draft

    def preempt(self, seq: Seq) -> None:
        """Take the seq's blocks back. It waits, its KV parked or to be computed again."""
        assert not seq.num_flights
        self._parking.park(seq)
        self._blocks.surrender(seq)
        self._roster.move(seq, SeqState.PREEMPTED)
        self.preemptions += 1

    def _seat_running(self, draft: Draft, ahead: bool) -> None:
        """Rows for seqs that have blocks already: one-row (decode) seqs first, then chunks. Only the first `seats`
        in rank get any, so that a long prompt among many short answers still gets its turn."""
        seated = self._roster.running[: draft.seats]
        if ahead:
            seated = [seq for seq in seated if not seq.num_pending or self._goes_on(seq)]
        chunks: list[Seq] = []
        for seq in seated:
            if not draft.tokens_left or draft.is_short:
                return
            if seq.state is not SeqState.RUNNING:
                continue  # preempted just now
            if seq.num_remaining > 1:
                chunks.append(seq)
            elif self._may_write(seq, draft, ahead):
                draft.give(seq)
        for seq in chunks:
            if not draft.takes_prompts:
                return
            if seq.state is SeqState.RUNNING:
                draft.give(seq)

    def _go_on(self, draft: Draft) -> None:
        """Everybody lacks a block, and the eldest cannot start: it waits for a seat, or has no right to blocks. The
        first of those that run stands in for it and takes from the last, or nobody would ever end."""
        running = self._roster.running
        victim = next(self._roster.behind(running[0].rank), None) if running else None
        if victim is None:
            return
        self.preempt(victim)
        if self._may_write(running[0], draft, ahead=False):
            draft.give(running[0])

    def _goes_on(self, seq: Seq) -> bool:
        """Whether a seq wants another row after its pending token, as far as can be known (it may yet be a stop)."""
        total = len(seq.tokens) + seq.num_pending
        most = seq.spec.num_prompt_tokens + seq.spec.sampling.max_tokens
        return total < min(most, self._limits.max_model_len) and not seq.spec.prefill_only

    def _may_write(self, seq: Seq, draft: Draft, ahead: bool) -> bool:
        """Whether the seq has a place for its next token that is its own."""
        return self._has_slot(seq, draft, ahead) and (not seq.shares_tail or self._owns_tail(seq, draft, ahead))

    def _has_slot(self, seq: Seq, draft: Draft, ahead: bool) -> bool:
        """Whether the seq's table covers all its tokens, if need be at the cost of seqs behind it in rank. (Those have
        no rows yet in this step, so no planned row is lost.)"""
        while seq.table_len < seq.num_blocks:
            if self._blocks.grow(seq):
                continue
            draft.is_short = ahead
            victim = None if ahead else self._rationing.victim(seq)
            if victim is None:
                self.stalls += not ahead and seq is self._roster.eldest()
                return False
            self.preempt(victim)
        return True

    def _owns_tail(self, seq: Seq, draft: Draft, ahead: bool) -> bool:
        """Whether nobody else will see what the seq writes into its last block, if need be at the cost of seqs behind
        it in rank, as in `_has_slot`. Not ahead: sources of copies are given back with the step that is over."""
        draft.is_short = ahead
        while not ahead:
            copy = self._forking.own_tail(seq)
            if not seq.shares_tail:
                draft.copies += [copy] if copy else []
                return True
            victim = self._rationing.victim(seq)
            if victim is None:
                return False
            self.preempt(victim)
        return False

    def _admit(self, draft: Draft, ahead: bool) -> None:
        """Start waiting seqs in order until one does not fit."""
        roster = self._roster
        while roster.waiting and len(roster.running) < draft.seats and draft.takes_prompts:
            seq = roster.waiting[0]
            quote = self._blocks.quote(seq, seq.max_hit_tokens)
            victims = self._rationing.to_start(quote)
            if ahead and (victims or (victims is None and quote.within_credit)):
                draft.is_short = True
            if ahead and seq.parked:  # parked by a step that may still fail
                draft.is_short = victims is not None
            if victims is None or draft.is_short:
                return
            if victims and (draft.copies or any(victim.parked for victim in victims)):
                return  # blocks that this very step fills cannot be parked by it
            for victim in victims:
                draft.take_back(victim)
                self.preempt(victim)
            self._blocks.acquire(seq, quote)
            self._progress.start(seq)
            draft.restores += self._parking.restores(seq)
            roster.move(seq, SeqState.RUNNING)
            draft.give(seq)
