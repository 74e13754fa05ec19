"""Times each CPU op beside what the machine can do at most. For `baton bench kernels`.

The watch is the caller's (`clock`, seconds), as everywhere below shared. `kernels.bench_cases` and
`kernels.bench_sampling` say what is timed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from kernels.cpu import _kernels
from kernels.packing import Format

Clock = Callable[[], float]
KINDS = {"float32": 0, "int8": 1, "int16": 2}
"""Kinds of arithmetic with a measured ceiling: float32 FMA, int8 and int16 dot products."""
FORMAT_KINDS = {Format.F32: "float32", Format.Q8: "int16", Format.Q4: "int8"}
"""What a matrix of this format is multiplied with."""

COLD_BYTES = 64 << 20
"""A cold op goes round so many bytes, so that what it takes next has left the caches (of up to half that size)."""
_MEMORY_BYTES, _PIECE = 256 << 20, 1 << 20
_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    `num_bytes` is what the op has to read and to write, each byte once: of a cold op only what it finds in memory
    (weights, keys and values, table rows; its activations are in a cache), of a warm one everything. What it reads a
    second time, or a cache line holds beside what it needs, does not count, so a rate is never more than was useful.
    """

    op: str
    shape: str
    num_bytes: int
    work: Mapping[str, int]  # operations by kind: additions, multiplications, comparisons; an exponential is one
    call: Callable[[], int] = field(repr=False)  # does the op so often
    is_cold: bool = False
    num_threads: int = 1  # that it is shared among
    kept: tuple[object, ...] = field(default=(), repr=False)  # what the call knows by its address only


@dataclass(frozen=True, slots=True)
class Timing:
    """`share` is of what bounds the op. `bound` is a kind of arithmetic (`arithmetic` where it has several), `memory`,
    or reading as many bytes as it does, over and over, from whatever cache holds them. "" and 0: not measured here."""

    op: str
    shape: str
    is_cold: bool
    num_threads: int
    microseconds: float
    gbs: float  # 10^9 bytes a second
    gops: float  # 10^9 operations a second
    share: float
    bound: str


class Ceilings:
    """What this machine's instructions and memory do at most, each measured when first asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ones = np.ones(_MEMORY_BYTES, np.uint8)
        self.gops, self.read_gbs = cache(self._gops), cache(self._read_gbs)  # kept as long as this object

    def flush(self) -> None:
        """Fill the caches with something else."""
        _kernels.peak_read(self._ones, _PIECE, 1, 1)

    def _gops(self, kind: str, num_threads: int) -> float:
        """10^9 operations a second of so many threads, from registers; 0 where this CPU has no measured loop."""
        iterations = 2_000_000
        return best_rate(self._clock, lambda: _kernels.peak_ops(KINDS[kind], iterations, num_threads), 5) / 1e9

    def _read_gbs(self, num_threads: int, kib: int = 0) -> float:
        """10^9 bytes a second, so many threads together: from memory, or each reading its own `kib` over and over."""
        if not kib:
            return best_rate(self._clock, lambda: _kernels.peak_read(self._ones, _PIECE, 1, num_threads), 5) / 1e9
        piece = kib * _KIB
        mine = self._ones[: num_threads * piece]
        passes = max(2, (16 << 20) // piece)
        return best_rate(self._clock, lambda: _kernels.peak_read(mine, piece, passes, num_threads), 5) / 1e9


def measure(cases: Iterable[Case], ceilings: Ceilings, clock: Clock, repeats: int) -> Iterator[Timing]:
    """Times them one by one; the best of so many counts, after a call that warms up code and threads, and for a cold op
    with caches full of other things."""
    for case in cases:
        case.call()
        if case.is_cold:
            ceilings.flush()
        yield judge(case, 1 / best_rate(clock, case.call, repeats), ceilings)


def judge(case: Case, seconds: float, ceilings: Ceilings) -> Timing:
    """What it means that the op takes so long."""
    bound, least = _least_seconds(case, ceilings)
    gbs, gops = case.num_bytes / seconds / 1e9, sum(case.work.values()) / seconds / 1e9
    share = least / seconds
    return Timing(case.op, case.shape, case.is_cold, case.num_threads, seconds * 1e6, gbs, gops, share, bound)


def _least_seconds(case: Case, ceilings: Ceilings) -> tuple[str, float]:
    """What holds the op up most at the ceilings, and for how long."""
    kib = 0 if case.is_cold else max(4, -(-case.num_bytes // case.num_threads // _KIB))
    if kib * _KIB * case.num_threads > _MEMORY_BYTES:
        kib = 0
    read = ceilings.read_gbs(case.num_threads, kib)
    bounds = {f"reading {kib} KiB" if kib else "memory": case.num_bytes / read / 1e9 if read else 0.0}
    peaks = {kind: ceilings.gops(kind, case.num_threads) for kind, count in case.work.items() if count}
    if peaks and all(peaks.values()):
        name = next(iter(peaks)) if len(peaks) == 1 else "arithmetic"
        bounds[name] = sum(case.work[kind] / peak / 1e9 for kind, peak in peaks.items())
    bound = max(bounds, key=lambda name: bounds[name])
    return (bound, bounds[bound]) if bounds[bound] else ("", 0.0)


def best_rate(clock: Clock, call: Callable[[], int], repeats: int) -> float:
    """The best rate of some calls, per second, in what a call says it has done."""
    best = 0.0
    for _ in range(repeats):
        began = clock()
        done = call()
        best = max(best, done / max(clock() - began, 1e-9))
    return best
