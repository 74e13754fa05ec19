"""The planner's own record of a seq, and when a seq ends.

waiting      no blocks, wants to start
landing      blocks reserved, its prompt's KV is being read from another worker
running      has blocks for all its tokens, gets rows in steps
preempted    blocks taken back; waits, and computes prompt and output again (or finds them cached)
handing_off  prefill only: computed, its blocks stay announced until released
aborted      over for the caller, but a step or a transfer still names its blocks

Rank: a lower priority number goes first, as in vLLM's API, but not for ever. A level of priority is worth
`ARRIVALS_PER_LEVEL` arrivals: `due = arrival + priority * ARRIVALS_PER_LEVEL`. The order of two seqs never changes, and
a seq is overtaken by a bounded number of later ones, so nobody starves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from services.engine.types import BayId, SeqSpec
from shared.hashing import block_hash
from shared.ids import BlockHash, BlockId
from shared.messages import SamplingParams, TokenLogprobs

ARRIVALS_PER_LEVEL = 64


class SeqState(Enum):
    WAITING = "waiting"
    LANDING = "landing"
    RUNNING = "running"
    PREEMPTED = "preempted"
    HANDING_OFF = "handing_off"
    ABORTED = "aborted"


def finish_reason(
    sampling: SamplingParams, output_tokens: Sequence[int], total_len: int, max_model_len: int
) -> Literal["stop", "length"] | None:
    """Whether a seq ends with its last output token. Pure: a replayed seq ends where the first one did.

    :param output_tokens: all output tokens so far, resumed ones included.
    :param total_len: prompt and output tokens.
    """
    last = output_tokens[-1] if output_tokens else None
    return ends_with(sampling, last, len(output_tokens), total_len, max_model_len)


def ends_with(
    sampling: SamplingParams, last_token: int | None, num_output_tokens: int, total_len: int, max_model_len: int
) -> Literal["stop", "length"] | None:
    """`finish_reason` from the numbers alone. `last_token`: None before the first output token."""
    if last_token is not None and last_token in sampling.stop_token_ids:
        return "stop"
    if num_output_tokens >= sampling.max_tokens or total_len >= max_model_len:
        return "length"
    return None


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the next token can be chosen before this host has seen the last one: no penalty and no grammar looks at
    it."""
    if sampling.grammar:
        return False
    return not sampling.presence_penalty and not sampling.frequency_penalty and sampling.repetition_penalty == 1.0


@dataclass(slots=True, eq=False)
class Seq:
    """Numbers of one seq. Only the planner and its helpers write them."""

    spec: SeqSpec
    arrival: int
    block_size: int
    credit: int  # blocks that it may have by right
    due: int = field(init=False)  # when its turn is, in arrivals
    rank: tuple[int, int] = field(init=False)  # whose turn it is: lower is served first, never preempted for higher
    is_plain_sampling: bool = field(init=False)  # how to choose a token does not depend on the token before
    tokens: list[int] = field(init=False)
    hashes: list[BlockHash] = field(init=False)  # of full blocks, extended on demand
    state: SeqState = SeqState.WAITING
    num_computed: int = 0  # tokens whose KV is in the pool
    num_planned: int = 0  # those, and the ones whose rows are in flight
    num_pending: int = 0  # tokens that steps in flight will sample
    num_flights: int = 0  # steps in flight that name it
    promised: int = 0  # credit not yet taken
    num_shared: int = 0  # blocks whose credit was given back, because another seq held them already
    num_cached_tokens: int = 0  # prompt tokens found cached at the first start
    admitted: bool = False  # got blocks at least once
    started: bool = False  # got rows at least once
    high_water: int = 0  # most tokens ever computed: what lies below is recomputed work
    num_announced: int = 0  # prefill only: leading blocks announced so far
    num_digested: int = 0  # prefill only: leading blocks whose digests are known or in flight
    num_hit_blocks: int = 0  # leading blocks of the table that were hits
    num_filled: int = 0  # leading full blocks that the pool knows to be full
    parked: tuple[BayId, ...] = ()  # where its KV waits in host memory, one bay a block
    num_parked: int = 0  # tokens whose KV is there
    is_forked: bool = False  # its siblings have been made
    shares_tail: bool = False  # other choices hold its partly filled last block too: it must not be written
    prompt_logprobs: list[TokenLogprobs] | None = None  # of tokens 1 and on, until they are told; None = not wanted
    _table: list[BlockId] = field(default_factory=list)
    _frozen_table: tuple[BlockId, ...] | None = None

    def __post_init__(self) -> None:
        self.due = self.arrival + self.spec.priority * ARRIVALS_PER_LEVEL
        self.rank = (self.due, self.arrival)
        self.is_plain_sampling = is_plain(self.spec.sampling)
        self.tokens = list(self.spec.token_ids)
        self.hashes = list(self.spec.block_hashes)
        if self.spec.sampling.prompt_logprobs is not None and not self.num_output:
            self.prompt_logprobs = []

    @property
    def waiting_rank(self) -> tuple[int, int]:
        """Order of the waiting line: a preempted seq, whose client is being answered, counts one level better."""
        return (self.due - (ARRIVALS_PER_LEVEL if self.state is SeqState.PREEMPTED else 0), self.arrival)

    @property
    def num_remaining(self) -> int:
        """Rows that it wants before its next token can be sampled."""
        return len(self.tokens) + self.num_pending - self.num_planned

    @property
    def is_plain(self) -> bool:
        """Whether its next row is known but for the token: nothing is done with that token first."""
        return self.is_plain_sampling and (self.is_forked or not self.spec.siblings)

    @property
    def num_first_tokens(self) -> int:
        """Tokens to choose from its last row: one for each choice, before they part."""
        return 1 if self.is_forked else 1 + len(self.spec.siblings)

    @property
    def max_hit_tokens(self) -> int:
        """Tokens that need not be computed if their KV is cached. The last one's row gives the next token; of a prompt
        whose logprobs are wanted, every row gives one."""
        last = len(self.tokens) - 1
        return last if self.prompt_logprobs is None else min(last, len(self.prompt_logprobs))

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.spec.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that its tokens need, pending ones included."""
        return -(-(len(self.tokens) + self.num_pending) // self.block_size)

    @property
    def table_len(self) -> int:
        return len(self._table)

    @property
    def table(self) -> tuple[BlockId, ...]:
        """Block table as plans share it: the same object until a block is added."""
        if self._frozen_table is None:
            self._frozen_table = tuple(self._table)
        return self._frozen_table

    def extend_table(self, blocks: Sequence[BlockId]) -> None:
        self._table.extend(blocks)
        self._frozen_table = None

    def replace_block(self, index: int, block: BlockId) -> None:
        """Another block in place of one that it shares with other choices."""
        self._table[index] = block
        self._frozen_table = None
        if index < self.num_shared:
            self.num_shared -= 1

    def join(self, leader: "Seq", first_token: int, promised: int) -> None:
        """Go on from the leader's prompt with a first token of its own. The caller counts the references."""
        self.tokens.append(first_token)
        self.hashes = list(leader.hashes)
        self.num_computed = self.num_planned = self.high_water = leader.num_computed
        self.num_filled = self.num_computed // self.block_size
        self.num_cached_tokens = leader.num_cached_tokens
        self.admitted = self.started = True
        self.prompt_logprobs = None
        self.promised = promised
        self.extend_table(leader.table)
        self.num_shared = self.table_len
        self.shares_tail = self.num_computed % self.block_size != 0

    def tell(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Logprobs of the prompt's tokens from `start + 1` on: what its rows from `start` on gave."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[start:] = logprobs

    def clear_table(self) -> None:
        self._table.clear()
        self._frozen_table = None

    def extend_hashes(self, num_blocks: int) -> None:
        """Let `hashes` reach over the first `num_blocks` blocks, all full of known tokens."""
        size = self.block_size
        for index in range(len(self.hashes), num_blocks):
            tokens = self.tokens[index * size : (index + 1) * size]
            assert len(tokens) == size
            self.hashes.append(block_hash(self.parent_hash(index), tokens))

    def parent_hash(self, index: int) -> BlockHash:
        """Hash that block `index` continues."""
        return self.hashes[index - 1] if index else self.spec.root_hash

    def is_over_credit(self) -> bool:
        return len(self._table) - self.num_shared > self.credit
