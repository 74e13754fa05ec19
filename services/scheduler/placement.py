"""Where a request goes: a pure function of the request's numbers, the workers' loads and the prefix hits.

Decode is the least loaded worker with room for the whole prompt and some growth; among workers about as loaded as
that one, the one that has the fewest prompt tokens to compute. Prefill is the worker with the fewest tokens to
compute before this prompt is done. A prompt with few uncached tokens stays on the decode worker, and so do all
prompts while no prefill worker fits (conditional disaggregation).

Loads are fractions, hits and queues are tokens, credit is blocks: none is ever compared with another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

from shared.config import SchedulerConfig
from shared.ids import BlockCount, Incarnation, TokenCount
from shared.messages import Role

LoadFraction = NewType("LoadFraction", float)
"""Part of a decode worker that is promised: 0 = idle, 1 = full batch or full pool."""

NEAR_TIE = LoadFraction(0.1)
"""Decode workers whose loads differ by no more than this count as equally loaded: prefix hits decide among them."""

MAX_SEQS_FACTOR = 2
"""Seqs sent to a decode worker, as a multiple of its batch: half of them may still be in prefill or landing. The rest
waits here, where it can still go to another worker."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs."""

    num_prompt_tokens: TokenCount  # prompt and the tokens already sent
    max_new_tokens: TokenCount  # still to be generated, at most, by each choice
    num_choices: int = 1
    num_shared_tokens: int = 0  # of those of the prompt: their full blocks serve all choices
    may_hand_off: bool = True


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker that takes new work, as the scheduler sees it now."""

    incarnation: Incarnation
    role: Role
    fingerprint: str
    protocol: int
    block_size: int
    num_blocks: BlockCount
    max_model_len: TokenCount
    max_num_seqs: int
    free_blocks: BlockCount  # decode credit that nobody has
    num_seqs: int  # sent to it and not ended
    prefill_tokens: TokenCount  # uncached prompt tokens sent to it and not known to be computed


@dataclass(frozen=True, slots=True)
class Placement:
    decode: Incarnation
    prefill: Incarnation | None  # None: decode computes the prompt itself
    credit_blocks: BlockCount
    uncached_tokens: TokenCount  # that whoever computes the prompt will have to compute
    num_seqs: int = 1  # on decode: one for each choice


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No live worker could serve the request even if it were idle."""

    reason: str


def place(
    demand: Demand,
    candidates: Sequence[Candidate],
    hits: Mapping[Incarnation, BlockCount],
    config: SchedulerConfig,
) -> Placement | Unplaceable | None:
    """Choose workers for one request.

    :param hits: leading prompt blocks that each worker holds; absent = none known.
    :returns: None while nobody has room, or no decode worker is there.
    """
    decoders = [c for c in candidates if c.role == "decode"]
    if not decoders:
        return None
    able = [c for c in decoders if blocks_at_end(demand, c) <= c.num_blocks and _fits_context(demand, c)]
    if not able:
        return Unplaceable(_why_not(demand, decoders))
    roomy = [c for c in able if _has_room(demand, c, config)]
    if not roomy:
        return None
    decode = _pick_decode(demand, roomy, hits)
    prefill = None
    worth_it = uncached_tokens(demand, decode, hits) >= config.min_handoff_tokens and demand.max_new_tokens > 0
    if worth_it and demand.may_hand_off:
        prefill = _pick_prefill(demand, (c for c in candidates if _is_pair(c, decode)), hits)
    return Placement(
        decode=decode.incarnation,
        prefill=prefill.incarnation if prefill else None,
        credit_blocks=credit_blocks(demand, decode, config),
        uncached_tokens=uncached_tokens(demand, prefill or decode, hits),
        num_seqs=demand.num_choices,
    )


def num_blocks_of(tokens: int, block_size: int) -> BlockCount:
    """Blocks that hold so many tokens."""
    return BlockCount(-(-tokens // block_size))


def credit_blocks(demand: Demand, worker: Candidate, config: SchedulerConfig) -> BlockCount:
    """Decode credit of a request: the whole prompt, ignoring hits, and bounded growth of every choice, whose first
    blocks are the same; no more than the pool has."""
    growth = min(demand.max_new_tokens, config.growth_tokens)
    blocks = num_blocks_of(min(demand.num_prompt_tokens + growth, worker.max_model_len), worker.block_size)
    own = blocks - demand.num_shared_tokens // worker.block_size
    return BlockCount(min(blocks + (demand.num_choices - 1) * own, max(blocks, worker.num_blocks)))


def blocks_at_end(demand: Demand, worker: Candidate) -> BlockCount:
    """Blocks of a request that runs to its limit: with more than the pool has, it could never finish there."""
    tokens = min(demand.num_prompt_tokens + demand.max_new_tokens, worker.max_model_len)
    return num_blocks_of(tokens, worker.block_size)


def uncached_tokens(demand: Demand, worker: Candidate, hits: Mapping[Incarnation, BlockCount]) -> TokenCount:
    """Prompt tokens that the worker would have to compute; the last one always."""
    held = hits.get(worker.incarnation, 0) * worker.block_size
    return TokenCount(max(1, demand.num_prompt_tokens - held))


def load_of(worker: Candidate) -> LoadFraction:
    """Load of a decode worker: whichever of batch and pool is fuller."""
    taken = worker.num_blocks - worker.free_blocks
    return LoadFraction(max(worker.num_seqs / worker.max_num_seqs, taken / worker.num_blocks))


def _fits_context(demand: Demand, worker: Candidate) -> bool:
    return demand.num_prompt_tokens <= worker.max_model_len


def _has_room(demand: Demand, worker: Candidate, config: SchedulerConfig) -> bool:
    if worker.num_seqs >= MAX_SEQS_FACTOR * worker.max_num_seqs:
        return False
    return credit_blocks(demand, worker, config) <= worker.free_blocks


def _pick_decode(demand: Demand, roomy: Sequence[Candidate], hits: Mapping[Incarnation, BlockCount]) -> Candidate:
    least = min(load_of(c) for c in roomy)
    near = [c for c in roomy if load_of(c) - least <= NEAR_TIE]
    return min(near, key=lambda c: (_tokens_ahead(demand, c, hits), load_of(c), c.incarnation))


def _pick_prefill(
    demand: Demand, pairs: Iterable[Candidate], hits: Mapping[Incarnation, BlockCount]
) -> Candidate | None:
    able = [
        c
        for c in pairs
        if num_blocks_of(demand.num_prompt_tokens, c.block_size) <= c.num_blocks and _fits_context(demand, c)
    ]
    return min(able, key=lambda c: (_tokens_ahead(demand, c, hits), c.num_seqs, c.incarnation), default=None)


def _tokens_ahead(demand: Demand, worker: Candidate, hits: Mapping[Incarnation, BlockCount]) -> TokenCount:
    """Tokens that the worker computes before this prompt is done."""
    return TokenCount(worker.prefill_tokens + uncached_tokens(demand, worker, hits))


def _is_pair(prefill: Candidate, decode: Candidate) -> bool:
    """Whether decode can read the prefill worker's blocks."""
    return prefill.role == "prefill" and (
        (prefill.fingerprint, prefill.protocol, prefill.block_size)
        == (decode.fingerprint, decode.protocol, decode.block_size)
    )


def _why_not(demand: Demand, decoders: Sequence[Candidate]) -> str:
    context = max(c.max_model_len for c in decoders)
    if demand.num_prompt_tokens > context:
        return f"the prompt has {demand.num_prompt_tokens} tokens, the longest context of a worker is {context}"
    total = demand.num_prompt_tokens + demand.max_new_tokens
    pool = max(c.num_blocks * c.block_size for c in decoders)
    return f"prompt and answer may reach {total} tokens, the largest KV pool of a worker holds {pool}"
