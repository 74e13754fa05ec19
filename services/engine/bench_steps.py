"""What `baton bench kernels` times of the engine itself: digests, the sampler with its Python, and whole steps."""

import mmap
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import numpy as np
import torch

from kernels.bench import COLD_BYTES, FORMAT_KINDS, Case
from kernels.bench_cases import ROWS
from kernels.bench_sampling import CALL_ROWS
from services.engine.load import ModelPlan
from services.engine.packing_plan import plan_pack
from services.engine.runner import ModelRunner
from services.engine.sampler import sample
from services.engine.types import PlanItem, SampleSpec, SeqId, StepPlan
from shared.hashing import block_digest
from shared.ids import BlockId
from shared.messages import SamplingParams

STEPS = (((1, 256),), ((1, 256),) * 16, ((128, 0),), ((128, 384),))
"""(rows, tokens before them) of each seq: decode alone and with 16, the first and the fourth chunk of a prompt."""
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


def digest(block_bytes: int, cold_bytes: int = COLD_BYTES) -> Case:
    """Of one cold block, in one thread. Mixing is left out of the count: reading bounds it."""
    count = 1 + cold_bytes // block_bytes
    data = memoryview(np.random.default_rng(0).bytes(count * block_bytes))
    turn, some = cycle(range(0, count * block_bytes, block_bytes)), min(8, count)

    def call() -> int:
        for first in islice(turn, some):
            block_digest(data[first : first + block_bytes])
        return some

    return Case("block_digest", f"{block_bytes} bytes", block_bytes, {}, call, is_cold=True)


def choices(vocab: int, num_threads: int, rows: Sequence[int] = ROWS) -> Iterator[Case]:
    """The engine's sampler on warm logits, its Python included. Greedy: numpy's argmax, one thread, one comparison."""
    logits = torch.from_numpy(4 * np.random.default_rng(0).standard_normal((max(rows), vocab), np.float32))
    ways = (
        ("sample greedy", SamplingParams(max_tokens=1, temperature=0.0), 1),
        ("sample drawn", SamplingParams(max_tokens=1, **DRAWN), 5),
    )
    for num_rows in rows:
        for op, params, steps in ways:
            threads = 1 if params.temperature == 0 else min(num_threads, num_rows)
            specs, some = [SampleSpec(params, 0, i) for i in range(num_rows)], logits[:num_rows]
            again = -(-CALL_ROWS // num_rows)

            def call(
                some: torch.Tensor = some,
                specs: list[SampleSpec] = specs,
                threads: int = threads,
                again: int = again,
            ) -> int:
                for _ in range(again):
                    sample(some, specs, threads)
                return again

            count = num_rows * vocab
            yield Case(op, f"{num_rows} x {vocab}", 4 * count, {"float32": steps * count}, call, num_threads=threads)


def whole_steps(plan: ModelPlan, num_threads: int) -> Iterator[Case]:
    """`ModelRunner.run` of the model: rows and tables laid out, all layers, the LM head for one row of each seq, and
    its best token. Weights and context are cold."""
    block_size = plan.kv.block_size
    most = max(len(step) * -(-(rows + start) // block_size) for step in STEPS for rows, start in step[:1])
    region = _some_context(most, plan.kv.block_bytes)
    model = plan.load()
    runner = ModelRunner(model, region, most, block_size=block_size, kv_dtype=plan.kv_dtype, num_threads=num_threads)
    for step in STEPS:
        num_rows, start = step[0]
        todo = step_plan(step, block_size)

        def call(todo: StepPlan = todo) -> int:
            runner.run(todo)
            return 1

        num_bytes, work = step_cost(plan, step)
        op = "decode step" if num_rows == 1 else "prefill chunk"
        shape = f"{len(step)} x {num_rows} @ {num_rows + start}"
        yield Case(op, shape, num_bytes, work, call, is_cold=True, num_threads=num_threads)


def step_plan(step: Sequence[tuple[int, int]], block_size: int) -> StepPlan:
    """Seqs with blocks of their own, each to choose its best token."""
    items, first = [], 0
    for i, (num_rows, start) in enumerate(step):
        end = first - (-(num_rows + start) // block_size)
        table = tuple(BlockId(block) for block in range(first, end))
        greedy = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0, start + num_rows)
        items.append(PlanItem(SeqId(str(i)), tuple(range(1, num_rows + 1)), start, table, greedy))
        first = end
    return StepPlan(0, tuple(items))


def step_cost(plan: ModelPlan, step: Sequence[tuple[int, int]]) -> tuple[int, dict[str, int]]:
    """Bytes that come from memory (each weight once, keys and values of the context), and operations by kind: products
    of all rows, the LM head's of one row a seq, attention."""
    spec, pack = plan.spec, plan_pack(plan.checkpoint, plan.dtype)
    num_rows = sum(rows for rows, _ in step)
    work: dict[str, int] = {}
    num_bytes = 0
    for entry in pack.entries:
        if entry.name == "embed" and not spec.tied_embeddings:
            continue  # a few rows of it
        num_bytes += entry.num_bytes
        if entry.fmt is not None:
            rows = len(step) if entry.name in ("embed", "head") else num_rows
            kind = FORMAT_KINDS[entry.fmt]
            work[kind] = work.get(kind, 0) + 2 * rows * entry.num_outputs * entry.num_inputs
    pairs = sum(rows * start + rows * (rows + 1) // 2 for rows, start in step)  # (row, token)
    attention = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    work["float32"] = work.get("float32", 0) + attention
    context = sum(start for _, start in step)
    return num_bytes + context * plan.kv.block_bytes // plan.kv.block_size, work


def _some_context(num_blocks: int, block_bytes: int) -> memoryview:
    """A pool of random finite numbers, whatever its type: bytes of 0x00..0x3B are small ones in all of them."""
    region = memoryview(mmap.mmap(-1, num_blocks * block_bytes))
    block = np.random.default_rng(0).integers(0, 0x3C, block_bytes, np.uint8)
    np.frombuffer(region, np.uint8).reshape(num_blocks, block_bytes)[:] = block
    return region
