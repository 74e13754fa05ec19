"""The fake runner finds the faults that it is there to find."""

import pytest

from services.engine.fake_runner import FakeRunner, fake_answer
from services.engine.types import PlanItem, SampleSpec, SeqId, StepPlan
from shared.ids import BlockId
from shared.messages import SamplingParams

SAMPLING = SamplingParams(max_tokens=9)


def item(tokens, start: int, table, *, sample: bool = True, name: str = "s") -> PlanItem:
    end = start + len(tokens)
    spec = SampleSpec(SAMPLING, 0, end) if sample else None
    return PlanItem(SeqId(name), tuple(tokens), start, tuple(map(BlockId, table)), spec)


def plan(*items: PlanItem, **more) -> StepPlan:
    return StepPlan(1, items, **more)


def test_tokens_equal_those_of_the_definition():
    """Chunks and scattered blocks make no difference."""
    runner = FakeRunner(8, 2)
    assert runner.run(plan(item([5, 6, 7], 0, [4, 1], sample=False))).sampled == ((),)
    first = runner.run(plan(item([8], 3, [4, 1]))).sampled[0][0]
    second = runner.run(plan(item([first], 4, [4, 1, 0]))).sampled[0][0]
    assert (first, second) == fake_answer([5, 6, 7, 8], 2)


@pytest.mark.parametrize("table", [[1, 4, 2], [4, 3, 2], [5, 1, 2]])
def test_a_wrong_block_is_found(table):
    """Swapped, never written and foreign blocks break the chain."""
    runner = FakeRunner(8, 2)
    runner.run(plan(item([5, 6, 7, 8], 0, [4, 1]), item([5, 7, 9, 9], 0, [5, 6], name="t")))
    with pytest.raises(AssertionError):
        runner.run(plan(item([9], 4, table)))


def test_two_writers_of_a_slot_are_found():
    """A block in two tables that both write it is a planner's fault."""
    runner = FakeRunner(8, 2)
    with pytest.raises(AssertionError, match="written twice"):
        runner.run(plan(item([5], 0, [3]), item([6], 0, [3], name="t")))


def test_a_short_table_is_found():
    """Rows need slots."""
    with pytest.raises(AssertionError, match="too short"):
        FakeRunner(8, 2).run(plan(item([5, 6, 7], 0, [3])))


def test_copies_come_before_rows_and_digests_after():
    """A copied block continues its source's chain; equal bytes have equal digests, others not."""
    runner = FakeRunner(8, 2)
    runner.run(plan(item([5], 0, [0])))
    copies = ((BlockId(0), BlockId(7)),)
    result = runner.run(plan(item([6], 1, [7]), copies=copies, digest_blocks=(BlockId(0), BlockId(7))))
    assert result.sampled[0] == fake_answer([5, 6], 1)
    assert result.digests == (runner.digest(BlockId(0)), runner.digest(BlockId(7)))
    assert result.digests[0] != result.digests[1]


def test_bytes_can_be_moved_to_another_region():
    """A reader that has the blocks' bytes goes on with the same text, in other blocks."""
    source = FakeRunner(4, 2)
    first = source.run(plan(item([5, 6, 7], 0, [2, 0]))).sampled[0][0]
    region = memoryview(bytearray(8 * source.block_bytes))
    reader = FakeRunner(8, 2, region=region)
    size = source.block_bytes
    for here, there in ((6, 2), (3, 0)):
        region[here * size : (here + 1) * size] = source.region[there * size : (there + 1) * size]
    assert reader.run(plan(item([first], 3, [6, 3]))).sampled[0] == fake_answer([5, 6, 7], 2)[1:]
