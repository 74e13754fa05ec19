"""`baton bench kernels`: each CPU op's time, and how near it comes to what this machine can do at most.

A program of its own, because the command line imports no engine.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kernels import bench
from kernels.bench_cases import ModelCases, Sizes
from kernels.bench_sampling import SamplingCases
from services.engine import bench_steps
from services.engine.host import pin
from services.engine.load import open_model
from services.engine.runner import configure_threads
from shared.clock import SystemClock
from shared.config import EngineConfig, ModelConfig
from shared.errors import ModelError

COLUMNS = ("op", "shape", "data", "threads", "us", "GB/s", "GOP/s", "share", "of")
WIDTHS = (26, 20, 5, 7, 10, 8, 8, 7, 18)
LEFT = {0, 1, 2, 8}
MAX_SHARE = 1.1  # more is beyond what a ceiling's own noise explains
BLOCK_BYTES = 368_640  # of the default model's pool: 16 tokens, 30 layers, float16


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print, line by line."""
    parser = argparse.ArgumentParser(prog="baton bench kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=9, help="the best of so many counts")
    args = parser.parse_args(argv)
    if args.threads < 1 or args.repeats < 1:
        parser.error("--threads and --repeats must be above 0")
    pin(set(sorted(os.sched_getaffinity(0))[: args.threads]))
    configure_threads(args.threads)
    clock = SystemClock()
    ceilings = bench.Ceilings(clock.now)
    for line in header(ceilings, args.threads):
        print(line, flush=True)
    highest = 0.0
    try:
        cases = chain(op_cases(args.threads), step_cases(args.threads))
        for timing in bench.measure(cases, ceilings, clock.now, args.repeats):
            print(line_of(timing), flush=True)
            highest = max(highest, timing.share)
    except ModelError as error:
        print(f"No whole steps: {error}")
    if why := doubt(ceilings, args.threads, highest):
        print(why, file=sys.stderr)


def op_cases(num_threads: int) -> Iterator[bench.Case]:
    """Every op at the default model's sizes."""
    sizes = Sizes()
    yield from ModelCases(sizes, num_threads).all()
    yield bench_steps.digest(BLOCK_BYTES)
    yield from SamplingCases(sizes.vocab, num_threads).all()
    yield from bench_steps.choices(sizes.vocab, num_threads)


def step_cases(num_threads: int) -> Iterator[bench.Case]:
    """:raises ModelError: the default model is not installed."""
    yield from bench_steps.whole_steps(open_model(ModelConfig(), EngineConfig()), num_threads)


def header(ceilings: bench.Ceilings, num_threads: int) -> Iterable[str]:
    """What the shares are of, and the columns."""
    for threads in sorted({1, num_threads}):
        peaks = ", ".join(f"{kind} {ceilings.gops(kind, threads):.0f} GOP/s" for kind in bench.KINDS)
        memory = ceilings.read_gbs(threads)
        yield f"Ceilings of {threads} thread(s): from registers {peaks}; reading memory {memory:.1f} GB/s"
    yield "cold: weights, keys and values come from memory, and only they are counted; warm: as the last call left it"
    yield _line(COLUMNS)


def doubt(ceilings: bench.Ceilings, num_threads: int, highest: float) -> str:
    """Why the figures are not to be trusted: other programs took part of the machine. "" if nothing shows it.

    :param highest: the highest share of a ceiling that an op had.
    """
    slower = [kind for kind in bench.KINDS if ceilings.gops(kind, num_threads) < ceilings.gops(kind, 1)]
    signs = [f"{num_threads} threads did less {kind} than one" for kind in slower]
    if highest > MAX_SHARE:
        signs.append(f"a share of {100 * highest:.0f} % is above its ceiling")
    return f"Warning: {'; '.join(signs)}. The machine was busy: run this again on an idle one." if signs else ""


def line_of(timing: bench.Timing) -> str:
    """One line of the table."""
    t = timing
    share = f"{100 * t.share:.0f} %" if t.bound else "-"
    data = "cold" if t.is_cold else "warm"
    cells = (f"{t.microseconds:.2f}", f"{t.gbs:.1f}", f"{t.gops:.1f}", share, t.bound or "-")
    return _line((t.op, t.shape, data, str(t.num_threads), *cells))


def _line(cells: Sequence[str]) -> str:
    texts = [
        cell.ljust(width) if i in LEFT else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return " ".join(texts).rstrip()


if __name__ == "__main__":
    main()
