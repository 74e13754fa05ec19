"""`baton bench kernels`: each CPU op's time, and how near it comes to what this machine can do at most.

A program of its own, because the command line imports no engine.
"""

import argparse
import os
from collections.abc import Iterable, Sequence

from kernels import bench
from services.engine.host import pin
from shared.clock import SystemClock

COLUMNS = ("op", "shape", "us", "GB/s", "GOP/s", "of the ceiling")
WIDTHS = (20, 22, 10, 8, 8, 15)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print, line by line."""
    parser = argparse.ArgumentParser(prog="baton bench kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=9, help="the best of so many counts")
    args = parser.parse_args(argv)
    if args.threads < 1 or args.repeats < 1:
        parser.error("--threads and --repeats must be above 0")
    pin(set(sorted(os.sched_getaffinity(0))[: args.threads]))
    clock = SystemClock()
    ceilings = bench.measure_ceilings(clock.now, args.threads)
    for line in report(ceilings, bench.run(clock.now, args.threads, ceilings, repeats=args.repeats), args.threads):
        print(line, flush=True)


def report(ceilings: bench.Ceilings, timings: Iterable[bench.Timing], num_threads: int) -> Iterable[str]:
    """The lines, as soon as each is known."""
    peaks = ", ".join(f"{name} {gops:.0f} GOP/s" for name, gops in ceilings.gops.items())
    yield f"Ceilings of {num_threads} thread(s), from registers: {peaks}; reading memory {ceilings.read_gbs:.1f} GB/s"
    yield _line(COLUMNS)
    for t in timings:
        cells = (f"{t.microseconds:.1f}", f"{t.gbs:.1f}", f"{t.gops:.1f}", f"{100 * t.share:.0f} %")
        yield _line((t.op, t.shape, *cells))


def _line(cells: Sequence[str]) -> str:
    texts = [
        cell.ljust(width) if i < 2 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return " ".join(texts)


if __name__ == "__main__":
    main()
