"""From a request, as the cell knows it, to seqs, as an engine does."""

from collections.abc import Sequence

from services.engine.types import SeqId, SeqOutput, SeqSpec
from shared.hashing import block_hashes
from shared.ids import RequestId
from shared.messages import RequestState, Tokens


def seq_ids(request_id: RequestId, epoch: int, num_choices: int) -> tuple[SeqId, ...]:
    """Of the request's choices, in order."""
    return tuple(SeqId(f"{request_id}/{epoch}/{choice}") for choice in range(num_choices))


def choice_of(seq_id: SeqId) -> int:
    return int(seq_id.rpartition("/")[2])


def leader_of(seq_id: SeqId) -> SeqId:
    """Choice 0 of the same request and epoch."""
    return SeqId(seq_id.rpartition("/")[0] + "/0")


def tokens_of(request_id: RequestId, epoch: int, choice: int, output: SeqOutput, num_cached_tokens: int = 0) -> Tokens:
    """A seq's output as the gateway wants it."""
    return Tokens(
        request_id,
        epoch,
        choice,
        output.index,
        output.token_ids,
        num_cached_tokens or output.num_cached_tokens,
        output.logprobs,
        output.prompt_logprobs,
    )


def seq_spec(
    state: RequestState, ids: Sequence[SeqId], block_size: int, *, prefill_only: bool = False, credit_blocks: int = 0
) -> SeqSpec:
    """One seq for all choices of a request, which part after their first tokens; or that of its only choice, resumed or
    not. The gateway has hashed the prompt already, unless it knew another block size than this worker's: then it is
    hashed here."""
    assert len(ids) == 1 or not any(state.outputs)
    return _spec(state, 0, ids, block_size, prefill_only=prefill_only, credit_blocks=credit_blocks)


def parted_specs(
    state: RequestState, choices: Sequence[int], ids: Sequence[SeqId], block_size: int, credit_blocks: int
) -> list[SeqSpec]:
    """A seq for each of `choices`, which have said something already. They share the credit evenly."""
    credit = credit_blocks // len(choices)
    return [_spec(state, c, ids[c : c + 1], block_size, prefill_only=False, credit_blocks=credit) for c in choices]


def _spec(
    state: RequestState, choice: int, ids: Sequence[SeqId], block_size: int, *, prefill_only: bool, credit_blocks: int
) -> SeqSpec:
    request = state.request
    hashes = request.block_hashes
    if len(hashes) != len(request.token_ids) // block_size:
        hashes = block_hashes(request.root_hash, request.token_ids, block_size)
    return SeqSpec(
        seq_id=ids[0],
        token_ids=request.token_ids + state.outputs[choice],
        num_prompt_tokens=len(request.token_ids),
        root_hash=request.root_hash,
        block_hashes=hashes,
        sampling=request.sampling,
        choice=choice,
        siblings=tuple(ids[1:]),
        priority=request.priority,
        prefill_only=prefill_only,
        credit_blocks=credit_blocks,
    )
