"""What this worker takes for typical work, measured at its start: the cost model's first observations."""

from services.engine.engine import shape_of
from services.engine.runner import ModelRunner
from services.engine.types import BayId, PlanItem, SampleSpec, SeqId, StepPlan
from shared.clock import Clock
from shared.cost import CostModel
from shared.ids import BlockId
from shared.messages import SamplingParams

CHUNK = 64
STEPS = (((16, 0),), ((CHUNK, CHUNK),), ((1, CHUNK),), ((1, CHUNK),) * 4)
"""Steps to time: (rows, tokens before them) of each seq."""
MOVED_BLOCKS = (1, 4)


def calibrate(runner: ModelRunner, costs: CostModel, clock: Clock, max_tokens: int) -> None:
    """Warm up, then time a few steps and copies; about twice the time of a short prompt. Writes into the pool's first
    blocks: call before any block is in use.

    :param max_tokens: of a step and of a seq. :param costs: told what was seen.
    """
    max_tokens = min(max_tokens, runner.num_blocks * runner.block_size - 1)
    for rows in (((min(CHUNK, max_tokens), 0),), ((1, min(CHUNK, max_tokens - 1)),)):
        runner.run(_plan(runner, rows))
    for rows in STEPS:
        if any(num_rows + start > max_tokens for num_rows, start in rows):
            continue
        plan = _plan(runner, rows)
        began = clock.now()
        runner.run(plan)
        costs.observe_step(shape_of(plan), clock.now() - began)
    for count in MOVED_BLOCKS:
        if count <= min(runner.num_bays, runner.num_blocks):
            moves = [(BlockId(i), BayId(i)) for i in range(count)]
            runner.move(moves, moves)
            began = clock.now()
            runner.move(moves, moves)
            costs.transfer.observe(clock.now() - began, 2 * count * runner.block_bytes)


def worth_parking(costs: CostModel, block_bytes: int, num_tokens: int, num_blocks: int) -> bool:
    """Whether copying a preempted seq's blocks out and back takes less time than computing them again."""
    out_and_back = costs.transfer.predict(2 * num_blocks * block_bytes)
    again = costs.recompute_s(num_tokens)
    return out_and_back is not None and again is not None and out_and_back < again


def _plan(runner: ModelRunner, rows: tuple[tuple[int, int], ...]) -> StepPlan:
    """A step of seqs that all use the same blocks: nobody reads what they write."""
    longest = max(num_rows + start for num_rows, start in rows)
    table = tuple(BlockId(i) for i in range(-(-longest // runner.block_size)))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    return StepPlan(
        0,
        tuple(
            PlanItem(SeqId(str(i)), (0,) * num_rows, start, table, SampleSpec(greedy, 0, start + num_rows))
            for i, (num_rows, start) in enumerate(rows)
        ),
    )
