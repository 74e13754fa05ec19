"""The benchmark's arithmetic: what it says of an op follows from its watch."""

from itertools import count, islice

import pytest

from kernels.bench import measure_ceilings, run
from kernels.ops import body_name


def test_rates_follow_from_the_watch():
    """With a watch that ticks a second per look, a call takes a second: bytes, operations and shares agree with it."""
    ticks = count()

    def watch() -> float:
        return float(next(ticks))

    first, second = islice(run(watch, 1, measure_ceilings(watch, 1), hidden=64, width=32, repeats=1), 2)
    assert (first.op, first.shape) == ("linear f32", "1 x 64 -> 32")
    calls = 1e6 / first.microseconds
    assert first.gops * 1e9 == pytest.approx(2 * 64 * 32 * calls)
    assert first.gbs * 1e9 == pytest.approx(4 * 64 * 32 * calls)
    assert second.gops * 1e9 == pytest.approx(2 * 16 * 64 * 32 * 1e6 / second.microseconds)
    assert (first.share > 0) == (body_name() == "avx2")  # elsewhere no ceiling is measured
