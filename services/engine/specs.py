"""From a request, as the cell knows it, to a seq, as an engine does."""

from services.engine.types import SeqId, SeqSpec
from shared.hashing import block_hashes
from shared.messages import RequestState


def seq_spec(
    state: RequestState, seq_id: SeqId, block_size: int, *, prefill_only: bool = False, credit_blocks: int = 0
) -> SeqSpec:
    """The seq of a request's only choice. The gateway has hashed the prompt already, unless it knew another block
    size than this worker's: then it is hashed here."""
    request = state.request
    hashes = request.block_hashes
    if len(hashes) != len(request.token_ids) // block_size:
        hashes = block_hashes(request.root_hash, request.token_ids, block_size)
    return SeqSpec(
        seq_id=seq_id,
        token_ids=state.token_ids,
        num_prompt_tokens=len(request.token_ids),
        root_hash=request.root_hash,
        block_hashes=hashes,
        sampling=request.sampling,
        priority=request.priority,
        prefill_only=prefill_only,
        credit_blocks=credit_blocks,
    )
