"""`python -m tests.sim`: many seeds, or one again, or one with a planted bug. Prints how fast it goes and a short trace
of what fails."""

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.sim import catches, runner
from tests.sim.mutants import BY_NAME
from tests.sim.plan import Plan, draw
from tests.sim.pool import Job, catch_it_alone, processes, run_seed
from tests.sim.runner import Report
from tests.sim.shrink import describe, shrink


def main() -> int:
    args = _arguments()
    if args.verbose:
        runner.LOG_LEVEL = 30
    if args.remember:
        return remember(args.jobs)
    if args.seed is not None:
        return one(args)
    return many(range(args.first, args.first + args.seeds), args.requests, args.jobs)


def one(args: argparse.Namespace) -> int:
    """One seed, shortened by hand or by itself, with its log."""
    mutant = BY_NAME[args.mutant] if args.mutant else None
    plan = _shortened(mutant.plan(args.seed, args.requests) if mutant else draw(args.seed, args.requests), args)

    def run(plan: Plan) -> Report:
        if mutant is None:
            return runner.run(plan)
        with mutant.planted():
            return runner.run(plan, mutant.overrides())

    report = run(plan)
    if report.violations:
        if args.clients is None and args.faults is None:
            report = shrink(plan, run)
        print(describe(report, args.requests, mutant=args.mutant or ""))
        return 1
    print("\n".join(report.log))
    print(dict(sorted(report.outcomes.items())))
    return 0


def many(seeds: range, num_requests: int, num_jobs: int | None) -> int:
    """Seeds on all cores."""
    began, failed, done = time.perf_counter(), [], 0
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    with processes(num_jobs) as each:
        for report in each(run_seed, [Job(seed, num_requests) for seed in seeds]):
            done += 1
            outcomes.update(report.outcomes)
            faults.update(report.faults)
            if report.violations:
                failed.append(report.plan.seed)
                print(describe(shrink(report.plan), num_requests), flush=True)
            if done % 50 == 0:
                print(f"{done} seeds, {len(failed)} failed, {time.perf_counter() - began:.0f} s", flush=True)
    took, total = time.perf_counter() - began, sum(outcomes.values())
    print(f"{total} requests, {done} seeds, failed {failed}: {took:.0f} s, {total / took:.0f} requests/s")
    print(f"outcomes {dict(sorted(outcomes.items()))}")
    print(f"faults {dict(sorted(faults.items()))}")
    return 1 if failed else 0


def remember(num_jobs: int | None) -> int:
    """Write down which seed shows each planted bug."""
    with processes(num_jobs) as each:
        found = []
        for one in each(catch_it_alone, list(BY_NAME)):
            found.append(one)
            said = f"seed {one.seed}: {one.violation[:100]!r}{' FAILS WITHOUT IT' if one.without else ''}"
            print(f"{one.name}: {said}", flush=True)
    lines = [f'    "{one.name}": {one.seed},' for one in found if one.seed is not None and not one.without]
    path = Path(catches.__file__)
    head = path.read_text().partition("CATCHES")[0]
    path.write_text(f"{head}CATCHES: dict[str, int] = {{\n" + "\n".join(lines) + "\n}\n")
    return int(len(lines) < len(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--requests", type=int, default=1000, help="of each seed; 1000 x 1000 seeds is a million")
    parser.add_argument("--seed", type=int, help="this one only, with its log")
    parser.add_argument("--jobs", type=int, help="processes; as many as there are cores")
    parser.add_argument("--mutant", help="with --seed: plant this bug")
    parser.add_argument("--remember", action="store_true", help="find a seed for each planted bug")
    parser.add_argument("--clients", type=int, help="only the first so many clients of the seed")
    parser.add_argument("--faults", help="only the faults at these times, comma-separated; `none`")
    parser.add_argument("--verbose", action="store_true", help="the services' warnings as well")
    return parser.parse_args()


def _shortened(plan: Plan, args: argparse.Namespace) -> Plan:
    if args.clients is not None:
        plan = replace(plan, asks=plan.asks[: args.clients])
    if args.faults is not None:
        wanted = set(args.faults.split(","))
        plan = replace(plan, faults=tuple(f for f in plan.faults if f"{f.at:.4f}" in wanted))
    return plan


if __name__ == "__main__":
    sys.exit(main())
