"""A runner without a model, whose answers are known and whose KV can tell when it is wrong.

The "KV" of a token is 16 bytes: the token, its position, and a state that hashes all tokens up to it. The next token
is a hash of the last state as read from the pool, so a wrong, stale or overwritten block changes the answer, and the
runner also asserts that each block table holds one unbroken chain. The bytes live in a region, as a real pool's do,
so that they can be sent to another worker.
"""

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from services.engine.last_tokens import LastTokens
from services.engine.types import PENDING, BayId, Move, PlanItem, SeqId, StepPlan, StepResult
from shared.hashing import block_digest
from shared.ids import BlockDigest, BlockId
from shared.messages import TokenLogprobs

_RECORD = struct.Struct("<IIQ")  # token, position + 1 (0 = never written), state
_KEY = struct.Struct("<QI")
_CHOICE = struct.Struct("<QIII")
VOCAB_SIZE = 997


def next_state(state: int, token: int) -> int:
    """State after one more token; 0 is the state of nothing."""
    return int.from_bytes(blake2b(_KEY.pack(state, token), digest_size=8).digest(), "little")


def next_token(state: int, choice: int, seed: int, position: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Token that follows `state` at `position`."""
    digest = blake2b(_CHOICE.pack(state, choice, seed & 0xFFFFFFFF, position), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def fake_logprob(token: int) -> TokenLogprobs:
    """What is told of a token, asked for logprobs: a function of the token, so that a mix-up shows."""
    return TokenLogprobs(-1.0 - token / 1024, 1 + token % 7)


def fake_answer(
    prompt: Sequence[int], num_tokens: int, *, choice: int = 0, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> tuple[int, ...]:
    """The first `num_tokens` output tokens to `prompt`, computed with no pool at all: the oracle."""
    state = 0
    for token in prompt:
        state = next_state(state, token)
    answer: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        answer.append(next_token(state, choice, seed, position, vocab_size))
        state = next_state(state, answer[-1])
    return tuple(answer)


class FakeRunner:
    """Implements `types.Runner`. Keeps no seq: all it knows is in the region.

    :param region: writable, `num_blocks * block_bytes`; None = its own memory.
    :param thorough: check the whole chain of each item (cost grows with context), else its last token only.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        region: memoryview | None = None,
        vocab_size: int = VOCAB_SIZE,
        thorough: bool = True,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._thorough = thorough
        self._region = memoryview(bytearray(num_blocks * self.block_bytes)) if region is None else region.cast("B")
        self._last = LastTokens()
        self._bays: dict[BayId, bytes] = {}
        assert len(self._region) == num_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return self._block_size * _RECORD.size

    @property
    def region(self) -> memoryview:
        return self._region

    def move(self, parks: Sequence[Move], restores: Sequence[Move]) -> None:
        for block, bay in parks:
            self._bays[bay] = bytes(self._block(block))
        for block, bay in restores:
            self._block(block)[:] = self._bays[bay]

    def run(self, plan: StepPlan) -> StepResult:
        """Asserts on a plan that a paged KV could not run rightly."""
        pending = self._last.take(plan)
        for source, target in plan.copies:
            self._block(target)[:] = self._block(source)
        written: set[int] = set()
        sampled = tuple(self._run_item(item, written, pending) for item in plan.items)
        self._last.put(plan, sampled)
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        for item, tokens in zip(plan.items, sampled, strict=True):
            wanted = item.sample is not None and item.sample.sampling.logprobs is not None
            logprobs.append(tuple(map(fake_logprob, tokens)) if wanted else ())
        told = tuple(tuple(map(fake_logprob, item.targets)) for item in plan.items)
        return StepResult(
            sampled,
            tuple(self.digest(block) for block in plan.digest_blocks),
            tuple(logprobs) if any(logprobs) else (),
            told if any(told) else (),
        )

    def digest(self, block: BlockId) -> BlockDigest:
        return block_digest(self._block(block))

    def _run_item(self, item: PlanItem, written: set[int], pending: Mapping[SeqId, int]) -> tuple[int, ...]:
        assert item.token_ids, f"seq {item.seq_id}: no rows"
        end = item.start + len(item.token_ids)
        assert end <= len(item.block_table) * self._block_size, f"seq {item.seq_id}: table too short"
        state = self._state_before(item)
        for position, known in enumerate(item.token_ids, item.start):
            token = pending[item.seq_id] if known == PENDING else known
            state = next_state(state, token)
            slot = self._slot(item, position)
            assert slot not in written, f"seq {item.seq_id}: slot {slot} written twice in one step"
            written.add(slot)
            _RECORD.pack_into(self._region, slot * _RECORD.size, token, position + 1, state)
        if item.sample is None:
            return ()
        assert item.sample.position == end, f"seq {item.seq_id}: samples {item.sample.position} after {end} tokens"
        sample = item.sample
        return tuple(
            next_token(state, sample.choice + i, sample.sampling.seed, sample.position, self._vocab_size)
            for i in range(sample.num_choices)
        )

    def _state_before(self, item: PlanItem) -> int:
        """State of the tokens before the item's first row, as the pool has it."""
        if not item.start:
            return 0
        first = 0 if self._thorough else item.start - 1
        before: int | None = None if first else 0
        for position in range(first, item.start):
            token, stored, state = _RECORD.unpack_from(self._region, self._slot(item, position) * _RECORD.size)
            assert stored == position + 1, f"seq {item.seq_id}: position {position} holds that of {stored - 1}"
            assert before is None or state == next_state(before, token), f"seq {item.seq_id}: broken at {position}"
            before = state
        assert before is not None
        return before

    def _slot(self, item: PlanItem, position: int) -> int:
        return item.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _block(self, block: BlockId) -> memoryview:
        return self._region[block * self.block_bytes : (block + 1) * self.block_bytes]
