"""The engine's step: off the loop, one at a time, and a failing runner costs only its own seqs."""

import dataclasses
import time

import anyio
import msgspec
import pytest

from services.engine.block_pool import BlockPool
from services.engine.engine import Engine
from services.engine.fake_runner import FakeRunner, fake_answer
from services.engine.planner import Planner, PlannerLimits
from services.engine.types import PENDING, SeqId, StepPlan, StepResult
from shared.clock import ManualClock
from shared.cost import CostModel, StepShape
from shared.offload import InlineOffload, ThreadLane
from tests.unit.engine.helpers import BLOCK, make_spec

pytestmark = pytest.mark.anyio


class GatedLane(InlineOffload):
    """Runs a step only once the test opens the gate."""

    def __init__(self) -> None:
        self.entered = anyio.Event()
        self.gate = anyio.Event()

    def submit(self, fn, *args):
        ticket = super().submit(fn, *args)
        wait = ticket.wait

        async def gated() -> None:
            self.entered.set()
            await self.gate.wait()
            await wait()

        ticket.wait = gated
        return ticket


class SickRunner(FakeRunner):
    """Raises on the steps named, or answers too little."""

    def __init__(self, num_blocks: int, *, raises: int = 0, truncates: int = 0) -> None:
        super().__init__(num_blocks, BLOCK)
        self.raises, self.truncates = raises, truncates

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == self.raises:
            raise RuntimeError("out of memory")
        result = super().run(plan)
        return StepResult(result.sampled[:-1]) if plan.step == self.truncates else result


def make_engine(offload=None, runner=None, *, num_blocks: int = 16, seqs: int = 8) -> Engine:
    limits = PlannerLimits(max_num_seqs=seqs, max_num_batched_tokens=32, max_model_len=num_blocks * BLOCK)
    planner = Planner(BlockPool(num_blocks, BLOCK), limits)
    runner = runner or FakeRunner(num_blocks, BLOCK)
    return Engine(planner, runner, offload or InlineOffload(), ManualClock())


async def run_out(engine: Engine) -> dict[str, list[int]]:
    """Tokens of all seqs until nothing is left to do."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        out = await engine.step()
        assert out is not None
        assert not out.failed
        engine.check()
        for seq in out.outputs:
            tokens.setdefault(seq.seq_id, []).extend(seq.token_ids)
    return tokens


@pytest.mark.parametrize("offload", [InlineOffload, ThreadLane])
async def test_seqs_run_to_their_ends(offload):
    """Steps inline and in a thread give the fake model's answers."""
    engine = make_engine(offload())
    engine.add(make_spec("a", range(5), 6))
    engine.add(make_spec("b", range(9), 3))
    tokens = await run_out(engine)
    assert tokens == {"a": list(fake_answer(range(5), 6)), "b": list(fake_answer(range(9), 3))}
    assert not engine.has_work
    assert await engine.step() is None


async def test_a_failing_step_ends_its_seqs_and_no_others():
    """The reason is reported, the blocks come back, and what waited goes on."""
    engine = make_engine(runner=SickRunner(16, raises=2), seqs=2)
    for name in ("a", "b", "c"):
        engine.add(make_spec(name, [ord(name)] * 6, 4))
    assert await engine.step() is not None
    out = await engine.step()
    assert out is not None
    assert out.failed == (("a", "RuntimeError: out of memory"), ("b", "RuntimeError: out of memory"))
    assert out.outputs == ()
    engine.check()
    assert await run_out(engine) == {"c": list(fake_answer([ord("c")] * 6, 4))}
    assert engine.stats().blocks_free == 16
    assert engine.stats().extra["failed_steps"] == 1


async def test_a_runner_that_answers_too_little_is_a_failure_too():
    """A result that does not fit its plan moves no seq."""
    engine = make_engine(runner=SickRunner(16, truncates=1))
    engine.add(make_spec("a", range(6), 4))
    out = await engine.step()
    assert out is not None
    assert [seq_id for seq_id, _ in out.failed] == ["a"]
    engine.check()
    assert await run_out(engine) == {}
    assert engine.stats().blocks_free == 16


async def test_an_aborted_seq_of_a_failing_step_is_not_reported():
    """Nobody hears of a seq after its abort, not even of its failure."""
    offload = GatedLane()
    engine = make_engine(offload, SickRunner(16, raises=1))
    engine.add(make_spec("a", range(6), 4))
    async with anyio.create_task_group() as tg:

        async def stepper() -> None:
            out = await engine.step()
            assert out is not None
            assert out.failed == ()

        tg.start_soon(stepper)
        await offload.entered.wait()
        engine.abort(SeqId("a"))
        offload.gate.set()
    assert await run_out(engine) == {}
    assert engine.stats().blocks_free == 16


async def test_everything_is_legal_while_a_step_runs():
    """Add, abort, reserve and drop do not disturb the step in flight."""
    offload = GatedLane()
    engine = make_engine(offload)
    engine.add(make_spec("a", range(6), 4))
    async with anyio.create_task_group() as tg:
        tg.start_soon(engine.step)
        await offload.entered.wait()
        assert engine.is_stepping
        engine.add(make_spec("b", range(7), 3))
        engine.add(make_spec("c", range(7), 3))
        engine.abort(SeqId("c"))
        assert engine.reserve(make_spec("d", range(50, 59), 4)) is not None
        engine.drop(SeqId("d"))
        engine.check()
        offload.gate.set()
    tokens = await run_out(engine)
    assert tokens["b"] == list(fake_answer(range(7), 3))
    assert engine.stats().output_tokens == 7


async def test_cancelling_a_step_leaves_no_plan_half_done():
    """The step is finished first; the engine can go on afterwards."""
    offload = GatedLane()
    engine = make_engine(offload)
    engine.add(make_spec("a", range(6), 4))
    async with anyio.create_task_group() as tg:
        tg.start_soon(engine.step)
        await offload.entered.wait()
        tg.cancel_scope.cancel()
        offload.gate.set()
    engine.check()
    assert engine.stats().output_tokens == 1
    assert (await run_out(engine))["a"] == list(fake_answer(range(6), 4))[1:]


async def test_stats_add_up():
    """Computed and cached prompt tokens make up the prompts; the cache's hashes are those announced."""
    engine = make_engine()
    spec = make_spec("a", range(12), 2)
    engine.add(spec)
    assert engine.stats().queued_tokens == 12
    await run_out(engine)
    assert engine.cached_hashes() == spec.block_hashes
    engine.add(make_spec("b", range(12), 2))
    await run_out(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_cached) == (16, 8)
    assert (stats.output_tokens, stats.queued_tokens, stats.num_running) == (4, 0, 0)
    assert stats.steps == 4
    assert engine.drain_events() == ()


class CountingLane(ThreadLane):
    """Notes what was handed over, and the most that was in the air."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[StepPlan] = []

    def submit(self, fn, *args):
        if isinstance(args[0], StepPlan):
            self.plans.append(args[0])
        return super().submit(fn, *args)


class SlowRunner(FakeRunner):
    """Each step lasts until the next one has been handed over, or nothing can be."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.lane: CountingLane | None = None
        self.overlapped = 0

    def run(self, plan: StepPlan) -> StepResult:
        assert self.lane is not None
        result = super().run(plan)
        for _ in range(200):
            if self.lane.plans[-1].step > plan.step:
                self.overlapped += 1
                break
            time.sleep(0.001)
        return result


async def test_the_next_step_is_planned_while_one_runs():
    """Decode rows of the next plan are pending while this step computes their tokens; the answers are the same."""
    runner, lane = SlowRunner(32), CountingLane()
    runner.lane = lane
    engine = make_engine(lane, runner, num_blocks=32)
    engine.add(make_spec("a", range(5), 12))
    engine.add(make_spec("b", range(50, 59), 7))
    assert await run_out(engine) == {"a": list(fake_answer(range(5), 12)), "b": list(fake_answer(range(50, 59), 7))}
    assert runner.overlapped == engine.stats().extra["steps_ahead"] == 11
    assert len(lane.plans) == 12
    assert all(item.token_ids == (PENDING,) for plan in lane.plans[1:] for item in plan.items)


async def test_a_stop_is_seen_although_the_next_row_is_on_its_way():
    """The answer ends with the stop token, and the blocks come back once the idle row is over."""
    runner, lane = SlowRunner(16), CountingLane()
    runner.lane = lane
    engine = make_engine(lane, runner)
    answer = fake_answer(range(6), 8)
    engine.add(make_spec("a", range(6), 8, stop=(answer[3],)))
    out = [await engine.step() for _ in range(4)]
    assert out[-1] is not None
    assert out[-1].outputs[0].finish == "stop"
    assert engine.stats().blocks_free < 16
    assert engine.has_work
    assert await run_out(engine) == {}
    assert engine.stats().blocks_free == 16


class NotingLane(InlineOffload):
    """Notes how long the engine would wait before it plans ahead."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def submit(self, fn, *args):
        ticket = super().submit(fn, *args)
        wait = ticket.wait_at_most

        async def noted(seconds: float) -> bool:
            self.waits.append(seconds)
            return await wait(seconds)

        ticket.wait_at_most = noted
        return ticket


@pytest.mark.parametrize(("step_s", "wait_s"), [(0.001, 0.0), (0.006, 0.0), (0.02, 0.016), (0.1, 0.08)])
async def test_a_long_step_is_planned_ahead_late_and_a_short_one_at_once(step_s: float, wait_s: float):
    """What arrives during a long step is in the next one; a short one is over before it would be worth the wait."""
    costs, lane = CostModel(), NotingLane()
    for num_seqs in (1, 2, 3):
        costs.observe_step(StepShape(num_seqs=num_seqs, kv_tokens=8 * num_seqs), step_s)
    limits = PlannerLimits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)
    planner = Planner(BlockPool(16, BLOCK), limits)
    engine = Engine(planner, FakeRunner(16, BLOCK), lane, ManualClock(), costs)
    engine.add(make_spec("a", range(4), 8))
    await run_out(engine)
    assert lane.waits[2:]
    assert lane.waits[2:] == pytest.approx([wait_s] * len(lane.waits[2:]), abs=1e-4)


async def test_a_seq_whose_next_token_depends_on_the_last_is_not_planned_ahead():
    """Penalties and grammars look at all tokens before: such a seq waits for each of them."""
    lane = CountingLane()
    engine = make_engine(lane)
    spec = make_spec("a", range(6), 5)
    for field in ({"presence_penalty": 0.5}, {"grammar": 'start: "a"'}):
        sampling = msgspec.structs.replace(spec.sampling, **field)
        engine.add(dataclasses.replace(spec, sampling=sampling))
        assert await run_out(engine) == {"a": list(fake_answer(range(6), 5))}
        assert engine.stats().extra["steps_ahead"] == 0
    assert all(PENDING not in item.token_ids for plan in lane.plans for item in plan.items)


async def test_a_plan_made_ahead_of_a_failing_step_costs_nobody_else():
    """Its seqs of the failed step are gone, the others are planned again."""
    engine = make_engine(InlineOffload(), SickRunner(16, raises=2))
    engine.add(make_spec("a", range(6), 4))
    await engine.step()
    engine.add(make_spec("b", range(50, 57), 4))
    tokens, failed = {}, []
    while engine.has_work:
        out = await engine.step()
        assert out is not None
        engine.check()
        failed += out.failed
        for seq in out.outputs:
            tokens.setdefault(seq.seq_id, []).extend(seq.token_ids)
    assert [seq_id for seq_id, _ in failed] == ["a"]
    assert tokens == {"b": list(fake_answer(range(50, 57), 4))}
    assert engine.stats().blocks_free == 16


async def test_a_reservation_gets_what_seqs_in_flight_hold():
    """Asked after each step, as a worker does, it waits for two of them at most, though a step is always in flight."""
    runner, lane = SlowRunner(16), CountingLane()
    runner.lane = lane
    engine = make_engine(lane, runner)
    engine.add(make_spec("eldest", [0] * 4, 30, credit=1))
    engine.add(make_spec("over", [1] * 20, 30, credit=1))
    for _ in range(6):
        await engine.step()
    refused = 0
    while engine.reserve(make_spec("d", range(100, 130), 4, credit=8)) is None:
        refused += 1
        await engine.step()
        engine.check()
    assert 1 <= refused <= 2
    assert engine.stats().preemptions == 1
    engine.drop(SeqId("d"))
    tokens = await run_out(engine)
    assert tokens["over"][-1] == fake_answer([1] * 20, 30)[-1]


class PickyRunner(FakeRunner):
    """Cannot choose a token for one seq, as when its grammar fails."""

    def __init__(self, num_blocks: int, victim: str) -> None:
        super().__init__(num_blocks, BLOCK)
        self.victim = victim

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        failed = [i for i, item in enumerate(plan.items) if item.seq_id == self.victim and item.sample is not None]
        sampled = tuple(() if i in failed else tokens for i, tokens in enumerate(result.sampled))
        return StepResult(sampled, result.digests, failed=tuple((i, "no token fits") for i in failed))


async def test_an_item_that_fails_alone_leaves_the_others_their_tokens():
    """One seq is reported failed and gives its blocks back; its neighbours' answers are what they always were."""
    engine = make_engine(runner=PickyRunner(16, "bad"))
    for name in ("a", "bad", "b"):
        engine.add(make_spec(name, range(10, 18), max_tokens=4))
    tokens: dict[str, list[int]] = {}
    failed: list[tuple[SeqId, str]] = []
    while engine.has_work:
        out = await engine.step()
        assert out is not None
        engine.check()
        failed += out.failed
        for seq in out.outputs:
            tokens.setdefault(seq.seq_id, []).extend(seq.token_ids)
    assert failed == [(SeqId("bad"), "no token fits")]
    want = list(fake_answer(range(10, 18), 4))
    assert tokens == {"a": want, "b": want}
    assert engine.stats().blocks_free == 16
