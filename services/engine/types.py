"""What the parts of the engine say to each other. Planner, pool and runner meet here and nowhere else.

The planner is pure Python and knows no tensor; the runner knows no queue. A `StepPlan` is all that passes
down, a `StepResult` all that comes back. What is made anew for each row or step is a msgspec struct, which is made ten
times as fast as a frozen dataclass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType, Protocol

import msgspec

from shared.ids import BlockDigest, BlockHash, BlockId
from shared.messages import FirstToken, Removed, SamplingParams, Stored, TokenLogprobs

SeqId = NewType("SeqId", str)
"""One seq in one engine, chosen by the worker service (request, epoch and choice): never reused."""


@dataclass(frozen=True, slots=True)
class SeqSpec:
    """A seq as the worker service hands it in. Frozen: the planner keeps its own numbers."""

    seq_id: SeqId
    token_ids: tuple[int, ...]  # prompt, plus tokens already sent to the client if resumed
    num_prompt_tokens: int  # the client's prompt; output index 0 follows it
    root_hash: BlockHash  # parent of the first block; needed where the prompt fills no block itself
    block_hashes: tuple[BlockHash, ...]  # of full blocks of the client's prompt
    sampling: SamplingParams
    choice: int = 0
    siblings: tuple[SeqId, ...] = ()  # further choices of the prompt, the next numbers: seqs that part from this one
    priority: int = 0  # lower is served first
    prefill_only: bool = False  # stop after one token; blocks stay pinned until `release`
    credit_blocks: int = 0  # blocks promised to it; 0 = takes what is free


class SampleSpec(msgspec.Struct, frozen=True):
    """How to choose the token that follows a plan item's last row."""

    sampling: SamplingParams
    choice: int
    position: int  # of the token to be chosen, counted from the start of the seq
    tokens: Sequence[int] = ()  # the seq's own list, which may grow meanwhile: read the first `position` of it
    num_prompt_tokens: int = 0  # of those; the others are output, which penalties and grammars are functions of
    num_choices: int = 1  # first tokens to choose from the one row, for `choice` and the ones after it


BayId = NewType("BayId", int)
"""Room for one block in host memory, where a preempted seq's KV is parked."""
Move = tuple[BlockId, BayId]
"""One block's bytes, from the pool to a bay or back."""

PENDING = -1
"""In a plan made while another is in flight: the token that the other one samples for the same seq."""


class PlanItem(msgspec.Struct, frozen=True):
    """The rows of one seq in one step: decode is one row, a prefill chunk is many."""

    seq_id: SeqId
    token_ids: tuple[int, ...]  # new tokens, [num_rows]; a lone `PENDING` if the token is not known yet
    start: int  # position of the first row = tokens whose KV is already in the pool
    block_table: tuple[BlockId, ...]  # covers start + num_rows tokens
    sample: SampleSpec | None  # None: a chunk that is not the last
    targets: tuple[int, ...] = ()  # tokens whose logprobs are wanted by the first rows; the next one's in row 0
    num_top: int = 0  # of the best tokens told beside each target


class StepPlan(msgspec.Struct, frozen=True):
    step: int
    items: tuple[PlanItem, ...]
    parks: tuple[Move, ...] = ()  # from the pool to host memory, first of all
    restores: tuple[Move, ...] = ()  # back into the pool, next
    copies: tuple[tuple[BlockId, BlockId], ...] = ()  # copy on write (source, target), before the step
    digest_blocks: tuple[BlockId, ...] = ()  # blocks to digest after the step
    after: int = 0  # the step that was in flight when this one was planned, and on which it builds; 0 = none

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


class StepResult(msgspec.Struct, frozen=True):
    """Aligned with the plan: `sampled[i]` are the new tokens of `items[i]`, empty where none was asked."""

    sampled: tuple[tuple[int, ...], ...]
    digests: tuple[BlockDigest, ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # of `sampled`, as asked; () where no item asked
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # of `targets`; () where no item has any
    failed: tuple[tuple[int, str], ...] = ()  # items that alone could not go on, and why: they have no new tokens


class Runner(Protocol):
    """Executes plans over one KV pool, in order. Called from one thread at a time, never from the event loop.

    A plan's `PENDING` tokens are those that the step `plan.after` sampled; if that one failed, `run` raises `StepLost`.
    """

    @property
    def block_bytes(self) -> int: ...

    def move(self, parks: Sequence[Move], restores: Sequence[Move]) -> None:
        """Copy blocks out to host memory, then others back in."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the step; its parks and restores were moved already."""
        ...


@dataclass(frozen=True, slots=True)
class Filled:
    """Blocks of a prefill-only seq that may be announced: full (or the last, partly filled, at the end)."""

    seq_id: SeqId
    first_block: int  # logical index of block_ids[0]
    block_ids: tuple[BlockId, ...]
    digests: tuple[BlockDigest, ...]
    last: FirstToken | None = None


class SeqOutput(msgspec.Struct, frozen=True):
    """New output tokens of one seq."""

    seq_id: SeqId
    index: int  # output index of token_ids[0]
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"] | None = None  # prefill-only seqs never finish by being handed off
    num_cached_tokens: int = 0  # prompt tokens found cached when the seq first started
    logprobs: tuple[TokenLogprobs, ...] = ()  # aligned with token_ids, if asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first output token, if asked: of tokens 1 and on


class StepOutput(msgspec.Struct, frozen=True):
    """What a step changed that others want to know."""

    outputs: tuple[SeqOutput, ...] = ()
    filled: tuple[Filled, ...] = ()
    kv_events: tuple[Stored | Removed, ...] = ()
    started: tuple[SeqId, ...] = ()  # seqs that got their first rows in this step
    failed: tuple[tuple[SeqId, str], ...] = ()  # the runner raised: these seqs are gone, with the reason
    num_tokens: int = 0
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks set aside at a reader for a whole prompt, before its KV arrives."""

    seq_id: SeqId
    block_ids: tuple[BlockId, ...]  # one per logical block of the prompt, the partly filled last included
    num_hit_blocks: int  # the first ones already hold the right bytes: skip them
    num_shared_blocks: int = 0  # of those, blocks that another seq holds too: their credit can be refunded


@dataclass(slots=True)
class EngineStats:
    """A snapshot for metrics and load reports."""

    num_waiting: int = 0
    num_running: int = 0
    num_landing: int = 0
    num_pinned_seqs: int = 0  # handed off, waiting for release
    blocks_total: int = 0
    blocks_free: int = 0  # takeable at once: free or cached
    blocks_cached: int = 0
    preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    output_tokens: int = 0
    steps: int = 0
    queued_tokens: int = 0  # prompt tokens not yet computed, over all seqs
    extra: dict[str, float] = field(default_factory=dict)
