"""Several choices of one prompt: one seq computes it, then there is a seq for each choice.

They share the prompt's blocks. The last one, if it is not full, is copied when a choice first writes into it, and the
last choice that still shares it writes in place.
"""

from collections.abc import Sequence
from dataclasses import replace

from services.engine.block_pool import BlockPool
from services.engine.roster import Roster
from services.engine.seq import Seq, SeqState, ends_with
from shared.ids import BlockId


class Forking:
    """Makes the further choices' seqs. `copied` are sources of planned copies, held until the step is over."""

    def __init__(self, pool: BlockPool, roster: Roster, max_model_len: int) -> None:
        self._pool, self._roster, self._max_model_len = pool, roster, max_model_len
        self.copied: list[BlockId] = []

    def fork(self, seq: Seq, first_tokens: Sequence[int]) -> None:
        """The prompt of `seq` is computed, and the first tokens of its siblings are known: they run from now on, those
        apart that end with it. Its promise is shared out."""
        assert len(first_tokens) == len(seq.spec.siblings)
        assert seq.num_computed == len(seq.spec.token_ids)
        share = seq.promised // (1 + len(first_tokens))
        for i, token in enumerate(first_tokens):
            if self.ends(seq, token):
                continue
            spec = replace(
                seq.spec,
                seq_id=seq.spec.siblings[i],
                choice=seq.spec.choice + 1 + i,
                siblings=(),
                credit_blocks=share,
            )
            sibling = Seq(spec, seq.arrival + 1 + i, seq.block_size, share)
            sibling.join(seq, token, share)
            self._pool.share(seq.table)
            seq.promised -= share
            seq.credit -= share
            sibling.state = SeqState.RUNNING
            self._roster.enter(sibling)
            seq.shares_tail = sibling.shares_tail
        seq.is_forked = True

    def ends(self, seq: Seq, first_token: int) -> bool:
        """Whether a choice would end with this first token."""
        return (
            ends_with(seq.spec.sampling, first_token, 1, len(seq.spec.token_ids) + 1, self._max_model_len) is not None
        )

    def own_tail(self, seq: Seq) -> tuple[BlockId, BlockId] | None:
        """Let `seq` have the block that it writes next for itself: the copy that is due before, None if none is.
        `shares_tail` stays set where no block can be had: nothing has changed then."""
        index = seq.num_computed // seq.block_size
        block = seq.table[index]
        if self._pool.refs(block) - self.copied.count(block) == 1:
            seq.shares_tail = False
            return None
        owed = min(1, seq.promised)
        taken = self._pool.take(1, promised=owed)
        if taken is None:
            return None
        seq.promised -= owed
        seq.replace_block(index, taken[0])
        seq.shares_tail = False
        self.copied.append(block)  # its reference is given back after the step
        return block, taken[0]

    def release_copied(self) -> None:
        """The step that copied them is over."""
        self._pool.release(self.copied)
        self.copied.clear()
