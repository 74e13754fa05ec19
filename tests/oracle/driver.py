"""Makes plans by hand and runs them: what the planner would do, reduced to bookkeeping."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from services.engine.model import Model
from services.engine.model_spec import KVDtype, kv_spec
from services.engine.runner import ModelRunner
from services.engine.step_batch import build_batch
from services.engine.types import PlanItem, SampleSpec, SeqId, StepPlan
from shared.ids import BlockId
from shared.messages import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def make_runner(
    model: Model, num_blocks: int, *, block_size: int = 16, kv_dtype: KVDtype = "float32", num_threads: int = 1
) -> ModelRunner:
    """A runner over private memory."""
    num_bytes = num_blocks * kv_spec(model.spec, block_size, kv_dtype).block_bytes
    region = memoryview(bytearray(num_bytes))
    return ModelRunner(model, region, num_blocks, block_size=block_size, kv_dtype=kv_dtype, num_threads=num_threads)


@dataclass
class Seq:
    """A seq with its blocks, all taken beforehand and scattered."""

    token_ids: list[int]
    block_table: tuple[BlockId, ...]
    done: int = 0  # tokens whose KV is in the pool
    sampling: SamplingParams = GREEDY
    logits: list[torch.Tensor] = field(default_factory=list)

    def item(self, num_rows: int, *, sample: bool = False) -> PlanItem:
        end = self.done + num_rows
        spec = SampleSpec(self.sampling, 0, end) if sample else None
        return PlanItem(SeqId(str(id(self))), tuple(self.token_ids[self.done : end]), self.done, self.block_table, spec)


def make_seqs(prompts: list[list[int]], *, room: int, num_blocks: int, block_size: int = 16) -> list[Seq]:
    """Seqs with room for `room` more tokens each; neighbouring blocks belong to different seqs."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    seqs = []
    for prompt in prompts:
        count = -(-(len(prompt) + room) // block_size)
        seqs.append(Seq(list(prompt), tuple(BlockId(order.pop()) for _ in range(count))))
    return seqs


@torch.inference_mode()
def forward(model: Model, runner: ModelRunner, rows: list[tuple[Seq, int]]) -> None:
    """One step of so many rows of each seq; every row's logits are appended to its seq."""
    batch = build_batch([seq.item(n) for seq, n in rows], runner.block_size)
    everything = replace(batch, logit_rows=np.arange(len(batch.token_ids), dtype=np.int32))
    logits = model.forward(everything, runner._pool).clone()
    for (seq, n), part in zip(rows, logits.split([n for _, n in rows]), strict=True):
        seq.logits.append(part)
        seq.done += n


def greedy(runner: ModelRunner, seqs: list[Seq], num_tokens: int, chunk: int) -> list[tuple[int, ...]]:
    """Prompts in chunks, mixed with the decode rows of seqs that are further; until each has its tokens."""
    out: dict[int, list[int]] = {id(seq): [] for seq in seqs}
    while pending := [seq for seq in seqs if len(out[id(seq)]) < num_tokens]:
        sizes = [min(chunk, len(seq.token_ids) - seq.done) for seq in pending]
        last = [seq.done + n == len(seq.token_ids) for seq, n in zip(pending, sizes, strict=True)]
        items = [seq.item(n, sample=at_end) for seq, n, at_end in zip(pending, sizes, last, strict=True)]
        result = runner.run(StepPlan(0, tuple(items)))
        for seq, n, sampled in zip(pending, sizes, result.sampled, strict=True):
            seq.done += n
            seq.token_ids.extend(sampled)
            out[id(seq)].extend(sampled)
    return [tuple(out[id(seq)]) for seq in seqs]
