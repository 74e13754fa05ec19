"""The whole system in one process, on virtual time, under seeded faults: every client is answered rightly, and nothing
is left behind. `python -m tests.sim` runs more seeds than these."""

from collections import Counter
from dataclasses import replace

import pytest

from shared.ids import Incarnation, RequestId
from tests.sim.background import REQUESTS, SEEDS
from tests.sim.loop import VirtualLoop
from tests.sim.plan import EVERY_KIND, Fault, draw
from tests.sim.pool import Job, processes, run_cancels
from tests.sim.runner import Report, run
from tests.sim.shrink import describe, shrink
from tests.sim.world import World

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_smoke(seed: int) -> None:
    """A short world of each kind: for a quick look, `-k smoke`."""
    plan = draw(seed, 60, every_s=0.3)
    if run(plan).violations:
        pytest.fail(describe(shrink(plan), 60), pytrace=False)


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_every_seed(reports: dict[int, Report], seed: int) -> None:
    """Conservation, one end per request, the right text, nothing left: whatever the seed does to the system."""
    if reports[seed].violations:
        pytest.fail(describe(shrink(reports[seed].plan), REQUESTS), pytrace=False)


@pytest.mark.skipif(SEEDS * REQUESTS < 10_000, reason="a short run meets too few faults")
def test_every_kind_of_fault_occurred(reports: dict[int, Report]) -> None:
    """Else the seeds prove less than they say."""
    counts = Counter[str]()
    for report in reports.values():
        counts.update(report.faults)
    print(dict(counts))
    for kind in EVERY_KIND:
        assert counts[kind] >= 3, f"{kind} came {counts[kind]} times in {SEEDS} seeds"


@pytest.mark.full
def test_ten_thousand_cancels_give_everything_back() -> None:
    """Clients leave while their request waits, computes, hands over or decodes: within a second of the last one all
    blocks, all credit and all leases are back at their initial count."""
    phases: Counter[str] = Counter()
    with processes() as each:
        for report in each(run_cancels, [Job(seed, 1000) for seed in range(1, 13)]):
            assert not report.violations
            assert report.quiet_s <= 1.0
            phases.update(report.cancelled_in)
    assert phases.total() >= 10_000
    assert min(phases[phase] for phase in ("queued", "dispatched", "prefill", "decode")) >= 100, phases


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_is_the_same_each_time(seed: int) -> None:
    """To the event: else no failure could be looked at twice."""
    plan = draw(seed, 60, every_s=0.3)
    first, second = run(plan), run(plan)
    assert first == second


@pytest.mark.parametrize("at", [3.3, 3.45, 3.49])
def test_a_clock_set_forward_is_no_fault_of_the_reapers(at: float) -> None:
    """Leases that end at once are not overdue before it may reap; whoever looks just then must know that."""
    plan = replace(draw(6, 60, kinds=(), pace=10), faults=(Fault(at, "jump", "", 0.0, 20.0),))
    assert not run(plan).violations


@pytest.mark.parametrize(("state", "num_ghosts"), [("decode", 1), ("done", 0), ("cancelled", 0)])
def test_a_ghost_speaks_of_what_its_gateway_knows(state: str, num_ghosts: int) -> None:
    """A gateway that was buried and came back has lost the marker of the last epoch, and its requests are cancelled."""

    async def haunt(loop: VirtualLoop) -> int:
        world = World(loop, draw(1, 5, kinds=()), None, [])
        store, stream = world.redis.store, world.keys.tokens(Incarnation("gateway-0.1")).key.encode()
        record = (b"st", state.encode(), b"ep", b"2", b"gw", b"gateway-0.1")
        store.run(b"HSET", world.keys.request(RequestId("r1")).encode(), *record)
        store.run(b"XADD", stream, b"*", b"m", b"before")
        world.judge.haunt()
        return store.run(b"XLEN", stream) - 2  # the echo of its last entry is no ghost

    loop = VirtualLoop(1)
    try:
        assert loop.run_until_complete(haunt(loop)) == num_ghosts
    finally:
        loop.close()


def test_without_faults_nobody_gets_an_error() -> None:
    """Only who leaves, or sends what is refused, is not answered in full."""
    report = run(draw(5, 200, kinds=()))
    assert not report.violations
    assert {outcome for outcome in report.outcomes if not outcome.startswith("error 400 ")} <= {
        "length",
        "stop",
        "left",
    }


def test_time_is_virtual_and_order_within_a_process_is_kept() -> None:
    """A day passes at once; callbacks of one process run in the order in which they were scheduled."""
    loop = VirtualLoop(1)
    seen: list[int] = []
    try:
        for i in range(50):
            loop.call_soon(seen.append, i)
        loop.call_later(86_400, loop.stop)
        loop.run_forever()
        assert loop.time() >= 86_400
    finally:
        loop.close()
    assert seen == list(range(50))


def test_a_failure_is_made_short() -> None:
    """One fault of many and a few clients are left where those alone make it fail."""
    plan = draw(2, 40, kinds=("wipe", "kv_loss"), every_s=0.1)
    culprit = next(fault for fault in plan.faults if fault.kind == "wipe")

    def fails(candidate):
        report = run(replace(candidate, asks=candidate.asks[:2]))
        return replace(report, plan=candidate, violations=("!",) if culprit in candidate.faults else ())

    short = shrink(plan, fails, max_runs=60)
    assert short.plan.faults == (culprit,)
    assert len(short.plan.asks) == 1
