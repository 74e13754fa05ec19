"""Builders and oracles for the engine's tests."""

import struct
from collections.abc import Sequence
from typing import Any

from services.engine.block_pool import BlockPool
from services.engine.fake_runner import FakeRunner, fake_answer, next_state
from services.engine.parking import Parking
from services.engine.planner import Planner, PlannerLimits
from services.engine.types import SeqId, SeqSpec, StepOutput
from shared.hashing import block_hashes, chain_root
from shared.ids import BlockHash, BlockId
from shared.messages import SamplingParams

ROOT = chain_root()
BLOCK = 4


def make_spec(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    sent: int = 0,
    stop: tuple[int, ...] = (),
    credit: int = 0,
    priority: int = 0,
    prefill_only: bool = False,
    choice: int = 0,
    choices: int = 1,
    **params: Any,
) -> SeqSpec:
    """A seq over `prompt`; `sent`: how many of its output tokens the client has already. Its siblings are called
    `<name>.1` and on."""
    return SeqSpec(
        seq_id=SeqId(name),
        token_ids=(*prompt, *fake_answer(prompt, sent, choice=choice)),
        num_prompt_tokens=len(prompt),
        root_hash=ROOT,
        block_hashes=block_hashes(ROOT, prompt, BLOCK),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, **params),
        choice=choice,
        siblings=tuple(SeqId(f"{name}.{i}") for i in range(1, choices)),
        priority=priority,
        prefill_only=prefill_only,
        credit_blocks=credit,
    )


def hashes(tokens: Sequence[int]) -> tuple[BlockHash, ...]:
    return block_hashes(ROOT, tokens, BLOCK)


class Rig:
    """A planner over a fake runner, stepped by hand, with the outputs collected."""

    def __init__(
        self,
        num_blocks: int,
        *,
        seqs: int = 8,
        budget: int = 64,
        prompts_until: int = 1 << 30,
        max_len: int = 0,
        caching: bool = True,
        bays: int = 0,
    ):
        self.pool = BlockPool(num_blocks, BLOCK)
        self.runner = FakeRunner(num_blocks, BLOCK)
        self.limits = PlannerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            prefill_batch_tokens=prompts_until,
            max_model_len=max_len or num_blocks * BLOCK,
            prefix_caching=caching,
        )
        self.planner = Planner(self.pool, self.limits, Parking(bays, lambda num_tokens, num_blocks: True))
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.num_computed_tokens = 0

    def step(self) -> StepOutput | None:
        """One whole step with all checks."""
        plan = self.planner.plan()
        self.planner.check()
        if plan is None:
            return None
        self.runner.move(plan.parks, plan.restores)
        output = self.planner.commit(plan, self.runner.run(plan))
        self.planner.check()
        self.note(output)
        return output

    def note(self, output: StepOutput) -> None:
        assert not output.failed
        self.num_computed_tokens += output.num_tokens
        for out in output.outputs:
            got = self.tokens.setdefault(out.seq_id, [])
            got.extend(out.token_ids)
            if out.finish:
                assert out.seq_id not in self.finished
                self.finished[out.seq_id] = out.finish

    def running(self) -> list[SeqId]:
        """Seqs that run, in order of rank."""
        return [seq.spec.seq_id for seq in self.planner._roster.running]  # the order is told to nobody else

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left to do; the number of steps."""
        for count in range(max_steps):
            if not self.planner.has_work:
                return count
            assert self.step() is not None, "work, but no plan"
        raise AssertionError("never ends")

    def write_kv(self, tokens: Sequence[int], table: Sequence[BlockId], first_block: int = 0) -> None:
        """What a transfer does: the right KV for `tokens`, from logical block `first_block` on."""
        for position, record in enumerate(kv_records(tokens)):
            if position >= first_block * BLOCK:
                slot = table[position // BLOCK] * BLOCK + position % BLOCK
                self.runner.region[slot * 16 : slot * 16 + 16] = record

    def holds_kv(self, tokens: Sequence[int], table: Sequence[BlockId]) -> bool:
        """Whether the blocks of `table` hold exactly the KV of `tokens`."""
        for position, record in enumerate(kv_records(tokens)):
            slot = table[position // BLOCK] * BLOCK + position % BLOCK
            if self.runner.region[slot * 16 : slot * 16 + 16] != record:
                return False
        return True

    def scribble(self, blocks: Sequence[BlockId]) -> None:
        """Spoil the bytes of these blocks, as a transfer that went wrong would."""
        for block in blocks:
            size = self.runner.block_bytes
            self.runner.region[block * size : (block + 1) * size] = b"\xee" * size


def kv_records(tokens: Sequence[int]) -> list[bytes]:
    """KV of each token by the fake model's definition."""
    state, records = 0, []
    for position, token in enumerate(tokens):
        state = next_state(state, token)
        records.append(struct.pack("<IIQ", token, position + 1, state))
    return records
