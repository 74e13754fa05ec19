"""A failing plan, made as short as it stays failing: fewer faults, fewer clients. The rest is a trace to read."""

from collections.abc import Callable
from dataclasses import replace

from tests.sim.plan import Plan
from tests.sim.runner import Report, run

MAX_RUNS = 40

Attempt = Callable[[Plan], Report | None]
"""The report of a run that violates something, or None."""


def shrink(plan: Plan, run: Callable[[Plan], Report] = run, max_runs: int = MAX_RUNS) -> Report:
    """Delta debugging by halves, first over the clients (a beginning of them is kept), then over the faults.

    :param run: how to run a plan.
    """
    runs = 0

    def attempt(candidate: Plan) -> Report | None:
        nonlocal runs
        runs += 1
        if runs > max_runs:
            return None
        report = run(candidate)
        return report if report.violations else None

    best = attempt(plan)
    assert best is not None, "the plan does not fail"
    best = _fewer_clients(best, attempt)
    return _fewer_faults(best, attempt)


def _fewer_clients(best: Report, attempt: Attempt) -> Report:
    size = len(best.plan.asks) // 2
    while size:
        shorter = replace(best.plan, asks=best.plan.asks[:-size])
        report = attempt(shorter) if shorter.asks else None
        if report is None:
            size //= 2
        else:
            best, size = report, min(size, len(report.plan.asks) // 2)
    return best


def _fewer_faults(best: Report, attempt: Attempt) -> Report:
    size = max(1, len(best.plan.faults) // 2)
    while best.plan.faults:
        for start in range(0, len(best.plan.faults), size):
            faults = best.plan.faults[:start] + best.plan.faults[start + size :]
            if (report := attempt(replace(best.plan, faults=faults))) is not None:
                best = report
                break
        else:
            if size == 1:
                break
            size //= 2
    return best


def describe(report: Report, num_requests: int, max_lines: int = 40, mutant: str = "") -> str:
    """How to run it again, what it was, what was seen last."""
    plan = report.plan
    keep = ",".join(f"{fault.at:.4f}" for fault in plan.faults) or "none"
    planted = f" --mutant '{mutant}'" if mutant else ""
    shortened = f"--clients {len(plan.asks)} --faults {keep}{planted}"
    lines = [
        f"python -m tests.sim --seed {plan.seed} --requests {num_requests} {shortened}",
        f"{plan.num_prefill} prefill, {plan.num_decode} decode, {plan.num_blocks} blocks, pace {plan.pace:g}",
        *map(str, plan.faults),
        "--- what happened",
        *report.log[-max_lines:],
        "--- violations",
        *report.violations[:5],
    ]
    return "\n".join(lines)
