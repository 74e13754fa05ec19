"""What a step's result does to its seqs: tokens, full blocks, announcements, ends. The second half of `commit`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

from services.engine.block_pool import BlockPool
from services.engine.forking import Forking
from services.engine.parking import Parking
from services.engine.roster import Roster
from services.engine.seq import Seq, SeqState, ends_with
from services.engine.seq_blocks import SeqBlocks
from services.engine.types import Filled, PlanItem, SeqId, SeqOutput, StepOutput, StepPlan, StepResult
from shared.ids import BlockDigest, BlockId
from shared.messages import FirstToken, TokenLogprobs


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_recomputed: int = 0  # rows computed before, and lost to a preemption
    output_tokens: int = 0


@dataclass(slots=True)
class _Report:
    outputs: list[SeqOutput] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    started: list[SeqId] = field(default_factory=list)
    failed: list[tuple[SeqId, str]] = field(default_factory=list)


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Assert that a runner answered what it was asked."""
    assert len(result.sampled) == len(plan.items), "results and plan items differ in number"
    assert len(result.digests) == len(plan.digest_blocks), "digests and planned blocks differ in number"
    failed = {index for index, _ in result.failed}
    for i, (item, sampled) in enumerate(zip(plan.items, result.sampled, strict=True)):
        if i in failed:
            assert not sampled, f"seq {item.seq_id}: tokens of a failed item"
            continue
        assert bool(sampled) == (item.sample is not None), f"seq {item.seq_id}: {len(sampled)} tokens sampled"
        wanted = item.sample.num_choices if item.sample else 1
        assert wanted == 1 or len(sampled) == wanted, f"seq {item.seq_id}: {len(sampled)} tokens for {wanted} choices"


class Progress:
    """Mutates seqs, roster and pool, by results alone."""

    def __init__(
        self,
        pool: BlockPool,
        blocks: SeqBlocks,
        parking: Parking,
        roster: Roster,
        forking: Forking,
        max_model_len: int,
    ) -> None:
        self._pool = pool
        self._blocks = blocks
        self._parking = parking
        self._roster = roster
        self._forking = forking
        self._max_model_len = max_model_len
        self.counts = Counts()

    def start(self, seq: Seq) -> None:
        """The seq just got its blocks: its hits are computed already, and so is what was parked."""
        seq.num_computed = seq.num_planned = max(seq.num_hit_blocks * self._pool.block_size, seq.num_parked)
        seq.high_water = max(seq.high_water, seq.num_computed)
        if not seq.admitted:
            seq.admitted = True
            seq.num_cached_tokens = min(seq.num_computed, seq.spec.num_prompt_tokens)
            self.counts.prompt_tokens_cached += seq.num_cached_tokens

    def blocks_to_digest(self, rows: dict[Seq, int]) -> tuple[BlockId, ...]:
        """Blocks that `rows` let a prefill-only seq announce and whose digests are neither known nor in flight."""
        wanted: dict[BlockId, None] = {}
        for seq, num_rows in rows.items():
            if not seq.spec.prefill_only:
                continue
            end = self._num_announceable(seq, seq.num_planned + num_rows)
            for block in seq.table[seq.num_digested : end]:
                if self._pool.digest(block) is None:
                    wanted[block] = None
            seq.num_digested = end
        return tuple(wanted)

    def apply(self, plan: StepPlan, result: StepResult, num_preempted: int) -> StepOutput:
        check_result(plan, result)
        for block, digest in zip(plan.digest_blocks, result.digests, strict=True):
            self._pool.set_digest(block, digest)
        report = _Report()
        failed = dict(result.failed)
        logprobs = result.logprobs or repeat(())
        for i, (item, sampled, told) in enumerate(zip(plan.items, result.sampled, logprobs, strict=False)):
            seq = self._roster.get(item.seq_id)
            assert seq is not None
            if self._is_over(seq, item):
                continue
            if i in failed:
                report.failed.append((item.seq_id, failed[i]))
                self.end(seq)
                continue
            self._advance(seq, item, report)
            if item.targets:
                seq.tell(item.start, result.prompt_logprobs[i])
            if sampled and seq.num_first_tokens > 1:
                self._part(seq, sampled, told, report)
            elif sampled:
                self._append(seq, sampled, told, report)
            elif seq.spec.prefill_only:
                self._announce(seq, None, report)
        return StepOutput(
            outputs=tuple(report.outputs),
            filled=tuple(report.filled),
            kv_events=self._pool.drain_events(),
            started=tuple(report.started),
            failed=tuple(report.failed),
            num_tokens=plan.num_tokens,
            num_preempted=num_preempted,
        )

    def fail(self, plan: StepPlan, reason: str) -> tuple[tuple[SeqId, str], ...]:
        """The seqs of a plan that was not run are over; those that the caller does not know to be."""
        failed: list[tuple[SeqId, str]] = []
        for item in plan.items:
            seq = self._roster.get(item.seq_id)
            assert seq is not None
            if not self._is_over(seq, item):
                failed.append((item.seq_id, reason))
                self.end(seq)
        return tuple(failed)

    def skip(self, plan: StepPlan) -> None:
        """As if the plan had never been made. No later one is in flight."""
        for item in plan.items:
            seq = self._roster.get(item.seq_id)
            assert seq is not None
            if not self._is_over(seq, item):
                seq.num_planned = item.start
                seq.num_digested = seq.num_announced

    def end(self, seq: Seq) -> None:
        """The seq is over: its blocks go back, at once or when no step in flight names them."""
        if seq.num_flights:
            self._roster.move(seq, SeqState.ABORTED)
        else:
            self.retire(seq)

    def _is_over(self, seq: Seq, item: PlanItem) -> bool:
        """Take the item out of flight; whether its seq had ended before."""
        seq.num_flights -= 1
        seq.num_pending -= item.sample is not None
        if seq.state is not SeqState.ABORTED:
            return False
        self.end(seq)
        return True

    def _advance(self, seq: Seq, item: PlanItem, report: _Report) -> None:
        """The KV of the item's rows is in the pool now."""
        before, now = item.start, item.start + len(item.token_ids)
        assert seq.num_computed == before
        if not seq.started:
            seq.started = True
            report.started.append(item.seq_id)
        fresh = max(before, min(seq.high_water, now))  # rows before it were computed once already
        prompt_end = len(seq.spec.token_ids)
        self.counts.tokens_recomputed += fresh - before
        self.counts.prompt_tokens_computed += max(0, min(now, prompt_end) - fresh)
        seq.high_water = max(seq.high_water, now)
        seq.num_computed = now
        self._blocks.fill(seq)
        if seq.parked:  # restored by the step
            self._parking.leave(seq)

    def _part(self, seq: Seq, sampled: Sequence[int], told: Sequence[TokenLogprobs], report: _Report) -> None:
        """The first tokens of all choices of a prompt: from here on there is a seq for each, or all are handed off."""
        index, cached = seq.num_output, seq.num_cached_tokens
        ends = [self._forking.ends(seq, token) for token in sampled]
        prompt_logprobs, seq.prompt_logprobs = tuple(seq.prompt_logprobs or ()), None
        for i, (seq_id, token) in enumerate(zip((seq.spec.seq_id, *seq.spec.siblings), sampled, strict=True)):
            size = len(seq.tokens) + 1
            finish = ends_with(seq.spec.sampling, token, index + 1, size, self._max_model_len) if ends[i] else None
            told_here, of_prompt = tuple(told[i : i + 1]), () if i else prompt_logprobs
            report.outputs.append(SeqOutput(seq_id, index, (token,), finish, cached, told_here, of_prompt))
        self.counts.output_tokens += len(sampled)
        if seq.spec.prefill_only and not all(ends):
            first = FirstToken(
                index=index,
                token_id=sampled[0],
                num_cached_tokens=cached,
                others=tuple(sampled[1:]),
                logprobs=tuple(told),
            )
            self._hand_off(seq, first, report)
            return
        if not seq.spec.prefill_only:
            self._forking.fork(seq, sampled[1:])
        seq.tokens.append(sampled[0])
        if ends[0]:
            self.end(seq)

    def _hand_off(self, seq: Seq, first: FirstToken, report: _Report) -> None:
        self._announce(seq, first, report)
        self._roster.move(seq, SeqState.HANDING_OFF)

    def _append(self, seq: Seq, sampled: Iterable[int], told: Sequence[TokenLogprobs], report: _Report) -> None:
        """New output tokens, cut after the one that ends the seq."""
        index = seq.num_output
        kept: list[int] = []
        finish: Literal["stop", "length"] | None = None
        for token in sampled:
            kept.append(token)
            seq.tokens.append(token)
            finish = ends_with(seq.spec.sampling, token, seq.num_output, len(seq.tokens), self._max_model_len)
            if finish or seq.spec.prefill_only:
                break
        assert len(kept) == 1 or not seq.num_flights, "a plan ahead reckoned with one token"
        self.counts.output_tokens += len(kept)
        logprobs, prompt_logprobs = tuple(told[: len(kept)]), ()
        if seq.prompt_logprobs is not None:
            prompt_logprobs, seq.prompt_logprobs = tuple(seq.prompt_logprobs), None
        cached = seq.num_cached_tokens
        report.outputs.append(SeqOutput(seq.spec.seq_id, index, tuple(kept), finish, cached, logprobs, prompt_logprobs))
        if finish:
            self.end(seq)
        elif seq.spec.prefill_only:
            first = FirstToken(index=index, token_id=kept[0], num_cached_tokens=cached, logprobs=logprobs)
            self._hand_off(seq, first, report)

    def _announce(self, seq: Seq, last: FirstToken | None, report: _Report) -> None:
        """Pin and report the blocks that may be read from now on."""
        first, end = seq.num_announced, self._num_announceable(seq, seq.num_computed)
        if first == end:
            return
        blocks = seq.table[first:end]
        self._pool.pin(blocks)
        seq.num_announced = end
        digests = tuple(self._digest(block) for block in blocks)
        report.filled.append(Filled(seq.spec.seq_id, first, blocks, digests, last))

    def _num_announceable(self, seq: Seq, num_computed: int) -> int:
        """Full blocks, and at the end of the prompt the partly filled last one."""
        if num_computed >= len(seq.spec.token_ids):
            return -(-num_computed // self._pool.block_size)
        return num_computed // self._pool.block_size

    def _digest(self, block: BlockId) -> BlockDigest:
        digest = self._pool.digest(block)
        assert digest is not None, f"block {block} is announced without a digest"
        return digest

    def retire(self, seq: Seq) -> None:
        """Nothing names its blocks any more: all that it has goes back, and it is forgotten."""
        self._blocks.surrender(seq)
        self._parking.leave(seq)
        self._roster.forget(seq)
