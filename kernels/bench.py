"""Times each CPU op beside what the machine can do at most. For `baton bench kernels`.

The watch is the caller's (`clock`, seconds), as everywhere below shared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kernels import ops
from kernels.cpu import _kernels
from kernels.packing import GROUP, Format, pack_f32, pack_q4, pack_q8

Clock = Callable[[], float]
_KINDS = {"float32": 0, "int8": 1, "int16": 2}
_FORMAT_PEAKS = {Format.F32: "float32", Format.Q8: "int16", Format.Q4: "int8"}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of `num_threads` threads together; 0 where this CPU has no measured loop."""

    gops: dict[str, float]  # float32 FMA, int8 and int16 dot products, in 10^9 operations a second
    read_gbs: float  # reading memory, 10^9 bytes a second


@dataclass(frozen=True, slots=True)
class Timing:
    """One op at one shape. `share` is of the nearer ceiling: arithmetic or memory."""

    op: str
    shape: str
    microseconds: float
    gbs: float  # of weights or keys and values
    gops: float
    share: float


def measure_ceilings(clock: Clock, num_threads: int) -> Ceilings:
    """About a second."""
    gops = {
        name: _best(clock, lambda k=kind: _kernels.peak_ops(k, 2_000_000, num_threads), 5) / 1e9
        for name, kind in _KINDS.items()
    }
    data = np.ones(256 << 20, np.uint8)
    return Ceilings(gops, _best(clock, lambda: _kernels.peak_read(data, num_threads), 5) / 1e9)


def run(
    clock: Clock, num_threads: int, ceilings: Ceilings, *, hidden: int = 576, width: int = 1536, repeats: int = 9
) -> Iterator[Timing]:
    """Every op at the shapes of a small model: one row (decode), 16 rows, 256 rows (prefill).

    :param ceilings: of so many threads. :param hidden, width: inputs and outputs of the linear layers.
    """
    bench = _Bench(clock, num_threads, repeats, ceilings)
    for fmt in Format:
        for num_rows in (1, 16, 256):
            yield bench.linear(fmt, num_rows, hidden, width)
    for num_seqs, num_rows, context in ((16, 1, 256), (16, 1, 1024), (1, 512, 512)):
        for dtype in (torch.float32, torch.float16):
            yield bench.attention(num_seqs, num_rows, context, dtype)


class _Bench:
    def __init__(self, clock: Clock, num_threads: int, repeats: int, ceilings: Ceilings) -> None:
        self._clock, self._threads, self._repeats, self._ceilings = clock, num_threads, repeats, ceilings
        self._rng = np.random.default_rng(0)

    def linear(self, fmt: Format, num_rows: int, inputs: int, outputs: int) -> Timing:
        packed = _random_weights(self._rng, fmt, outputs, inputs)
        # As many copies as no cache holds: a step reads every layer's weights once.
        matrices = [
            _kernels.Matrix(int(fmt), outputs, inputs, packed.copy()) for _ in range(1 + (64 << 20) // packed.nbytes)
        ]
        x = self._rng.standard_normal((num_rows, inputs)).astype(np.float32)
        out = np.empty((num_rows, outputs), np.float32)
        count = max(1, min(len(matrices), 512 // num_rows))

        def call() -> int:
            for w in matrices[:count]:
                _kernels.linear(w, x, out, 0, self._threads, True)
            matrices[:] = matrices[count:] + matrices[:count]
            return count

        seconds = 1 / _best(self._clock, call, self._repeats)
        work = 2 * num_rows * inputs * outputs
        peak = self._ceilings.gops[_FORMAT_PEAKS[fmt]]
        return self._timing(
            f"linear {fmt.name.lower()}", f"{num_rows} x {inputs} -> {outputs}", seconds, packed.nbytes, work, peak
        )

    def attention(self, num_seqs: int, num_rows: int, context: int, dtype: torch.dtype) -> Timing:
        heads, kv_heads, head_dim, block_size = 9, 3, 64, 16
        blocks = -(-context // block_size)
        cache = torch.zeros(num_seqs * blocks, kv_heads, 2, block_size, head_dim).normal_().to(dtype)
        tables = torch.randperm(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_rows
        contexts = torch.full((num_seqs,), context, dtype=torch.int32)
        q = torch.randn(num_seqs * num_rows, heads, head_dim)
        out = torch.empty_like(q)

        def call() -> int:
            ops.paged_attention(out, q, cache, tables, starts, contexts, head_dim**-0.5, self._threads)
            return 1

        seconds = 1 / _best(self._clock, call, self._repeats)
        seen = num_rows * context - num_rows * (num_rows - 1) // 2  # (row, token) pairs of one seq
        work, num_bytes = num_seqs * seen * heads * head_dim * 4, cache.numel() * cache.element_size()
        name = f"attention {str(dtype).removeprefix('torch.')}"
        shape = f"{num_seqs} x {num_rows} @ {context}"
        return self._timing(name, shape, seconds, num_bytes, work, self._ceilings.gops["float32"])

    def _timing(self, op: str, shape: str, seconds: float, num_bytes: int, work: int, peak: float) -> Timing:
        gbs, gops = num_bytes / seconds / 1e9, work / seconds / 1e9
        shares = [gops / peak if peak else 0.0, gbs / self._ceilings.read_gbs if self._ceilings.read_gbs else 0.0]
        return Timing(op, shape, seconds * 1e6, gbs, gops, max(shares))


def _best(clock: Clock, call: Callable[[], int], repeats: int) -> float:
    """The best rate of some calls, per second, in what a call says it has done."""
    best = 0.0
    for _ in range(repeats):
        began = clock()
        done = call()
        best = max(best, done / max(clock() - began, 1e-9))
    return best


def _random_weights(rng: np.random.Generator, fmt: Format, outputs: int, inputs: int) -> np.ndarray:
    groups = -(-inputs // GROUP)
    scale = rng.random((outputs, groups)).astype(np.float16)
    if fmt == Format.F32:
        return pack_f32(rng.standard_normal((outputs, inputs)).astype(np.float32))
    if fmt == Format.Q8:
        return pack_q8(rng.integers(-127, 128, (outputs, inputs)).astype(np.int8), scale)
    return pack_q4(rng.integers(0, 16, (outputs, inputs)).astype(np.uint8), scale, -scale)
