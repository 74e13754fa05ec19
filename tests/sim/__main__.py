"""`python -m tests.sim`: many seeds, or one again. Prints how fast it goes and a short trace of what fails."""

import argparse
import sys
import time
from dataclasses import replace

from tests.sim import runner
from tests.sim.plan import Plan, draw
from tests.sim.shrink import describe, shrink


def main() -> int:
    args = _arguments()
    if args.verbose:
        runner.LOG_LEVEL = 30
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
    began, failed, total = time.perf_counter(), 0, 0
    outcomes: dict[str, int] = {}
    for seed in seeds:
        plan = _shortened(draw(seed, args.requests), args)
        report = runner.run(plan)
        total += len(plan.asks)
        for name, count in report.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
        if report.violations:
            failed += 1
            short = report if args.seed is not None else shrink(plan)
            print(describe(short, args.requests), flush=True)
        elif args.seed is not None:
            print("\n".join(report.log))
    took = time.perf_counter() - began
    print(f"{total} requests, {len(seeds)} seeds, {failed} failed: {took:.0f} s, {total / took:.0f} requests/s")
    print(dict(sorted(outcomes.items())))
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--requests", type=int, default=1000, help="of each seed; 1000 x 1000 seeds is a million")
    parser.add_argument("--seed", type=int, help="this one only, with its log")
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
