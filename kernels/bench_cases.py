"""What `baton bench kernels` times of a model's step: products, attention, row-wise ops, rows of the KV pool.

Row-wise ops run as the C++ step runs them, though the step has some of them inside a product (the gate), or behind one
another on a row (norm and preparation, which are also timed together). What has no `passes` of its own includes its
call from Python, about half a microsecond.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

import numpy as np
import torch

from kernels.bench import COLD_BYTES, FORMAT_KINDS, Case
from kernels.cpu import _kernels
from kernels.cpu.body import layer_cache
from kernels.kv_rows import CACHE_DTYPES, encode_rows, is_scaled
from kernels.packing import GROUP, OUTS, Format, pack_f32, pack_q4, pack_q8, packed_bytes

T = TypeVar("T")

ROWS = (1, 16, 128)
STORE, ADD, SILU_MUL, GELU_MUL = 0, 1, 2, 3
"""What becomes of a product, `Finish` in kernels/cpu/linear.h."""
PIECE_ROWS = 8
"""Rows that one thread takes at once, as in kernels/cpu/threads.h."""
_PASS_BYTES = 4 << 20  # a warm op is done so often that it moves so much per call


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model; by default SmolLM2-135M's."""

    hidden: int = 576
    intermediate: int = 1536
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    block_size: int = 16

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class ModelCases:
    """:param cold_bytes: how much the cold ops go round."""

    def __init__(self, sizes: Sizes, num_threads: int, cold_bytes: int = COLD_BYTES) -> None:
        self._sizes, self._threads, self._cold_bytes = sizes, num_threads, cold_bytes
        self._rng = np.random.default_rng(0)

    def all(self) -> Iterator[Case]:
        """Each made when it is its turn: their data would not fit side by side."""
        s, rows = self._sizes, ROWS
        for name, inputs, outputs, finish in (
            ("qkv", s.hidden, s.qkv_width, STORE),
            ("o, add", s.num_heads * s.head_dim, s.hidden, ADD),
            ("gate_up, silu", s.hidden, 2 * s.intermediate, SILU_MUL),
            ("down, add", s.intermediate, s.hidden, ADD),
        ):
            yield from self.linear(f"linear q4 {name}", Format.Q4, inputs, outputs, finish, rows)
        for fmt in (Format.Q8, Format.F32):
            name = f"linear {fmt.name.lower()} gate_up, silu"
            yield from self.linear(name, fmt, s.hidden, 2 * s.intermediate, SILU_MUL, rows)
        yield from self.linear("linear q8 LM head", Format.Q8, s.hidden, s.vocab, STORE, rows)
        yield from self.embedding(Format.Q8, rows)
        for num_seqs, num_rows, context in ((1, 1, 256), (16, 1, 1024), (128, 1, 256), (1, 128, 128), (1, 128, 512)):
            yield self.attention(num_seqs, num_rows, context, torch.float16)
        for dtype in CACHE_DTYPES:
            yield self.attention(16, 1, 256, dtype)
            yield from self.store_kv(dtype, rows)
        for num_rows in rows:
            yield self.rms_norm(num_rows)
            yield self.rope(num_rows)
            yield self.gate_mul("silu_mul", num_rows)
            yield self.gate_mul("gelu_mul", num_rows)
            for fmt in (Format.Q4, Format.Q8):
                yield self.prepare(fmt, num_rows, is_normed=False)
                yield self.prepare(fmt, num_rows, is_normed=True)

    def linear(
        self, op: str, fmt: Format, inputs: int, outputs: int, finish: int, rows: tuple[int, ...]
    ) -> Iterator[Case]:
        """Product with packed weights, which are cold: a step reads every layer's once. Preparation of the rows
        included. `outputs` counts gates and ups where the product is gated."""
        data = _random_weights(self._rng, fmt, outputs, inputs)
        matrices = [_kernels.Matrix(int(fmt), outputs, inputs, data.copy()) for _ in range(self._copies(data.nbytes))]
        width = outputs // 2 if finish in (SILU_MUL, GELU_MUL) else outputs
        for num_rows in rows:
            x, out = self._floats(num_rows, inputs), np.zeros((num_rows, width), np.float32)

            def once(w: _kernels.Matrix, x: np.ndarray = x, out: np.ndarray = out) -> None:
                _kernels.linear(w, x, out, finish, self._threads, True)

            work = {FORMAT_KINDS[fmt]: 2 * num_rows * inputs * outputs}
            shape = f"{num_rows} x {inputs} -> {outputs}"
            call = _around(matrices, once, max(1, 512 // num_rows))
            yield Case(op, shape, data.nbytes, work, call, is_cold=True, num_threads=self._threads)

    def embedding(self, fmt: Format, rows: tuple[int, ...]) -> Iterator[Case]:
        """Rows of the packed table, widened to float32. A row's numbers lie apart, in the blocks of the LM head that
        the table also is, so far more cache lines are read than it has bytes."""
        s = self._sizes
        data = _random_weights(self._rng, fmt, s.vocab, s.hidden)
        tables = [_kernels.Matrix(int(fmt), s.vocab, s.hidden, data.copy()) for _ in range(self._copies(data.nbytes))]
        num_bytes, steps = packed_bytes(fmt, OUTS, s.hidden) // OUTS, {Format.F32: 0, Format.Q8: 1, Format.Q4: 2}[fmt]
        for num_rows in rows:
            shape = (4 * len(tables), max(1, 1024 // num_rows), num_rows)
            ids = self._rng.integers(0, s.vocab, shape).astype(np.int32)
            turn = cycle(zip(tables * 4, ids, strict=True))
            out = np.empty((num_rows, s.hidden), np.float32)

            def call(
                turn: Iterator[tuple[_kernels.Matrix, np.ndarray]] = turn, out: np.ndarray = out, passes: int = shape[1]
            ) -> int:
                table, some = next(turn)
                _kernels.read_rows(table, some, out, self._threads)
                return passes

            work = {"float32": num_rows * s.hidden * steps}
            yield Case(
                f"embedding {fmt.name.lower()}",
                f"{num_rows} x {s.hidden}",
                num_rows * num_bytes,
                work,
                call,
                is_cold=True,
                num_threads=self._threads_for(num_rows),
            )

    def attention(self, num_seqs: int, num_rows: int, context: int, dtype: torch.dtype) -> Case:
        """Paged attention of one layer over cold keys and values."""
        s = self._sizes
        blocks = -(-context // s.block_size)
        pool = self._pool(dtype, num_seqs * blocks)
        cache, scale = layer_cache(pool), s.head_dim**-0.5
        count = len(pool) // (num_seqs * blocks)
        shuffled = self._rng.permutation(len(pool))[: count * num_seqs * blocks].astype(np.int32)
        tables = [shuffled.ctypes.data + 4 * i * num_seqs * blocks for i in range(count)]
        starts = np.arange(num_seqs + 1, dtype=np.int32) * num_rows
        contexts = np.full(num_seqs, context, np.int32)
        q = self._floats(num_seqs * num_rows, s.num_heads * s.head_dim)
        out = np.empty_like(q)

        to, rows, ends, lengths = (x.ctypes.data for x in (out, q, starts, contexts))
        width = q.shape[1]

        def once(table: int) -> None:
            _kernels.paged_attention(
                cache, to, rows, width, width, s.num_heads, table, num_seqs, blocks, ends, lengths, scale, 0, 0.0,
                self._threads, True,
            )  # fmt: skip

        seen = num_rows * context - num_rows * (num_rows - 1) // 2  # (row, token) pairs of one seq
        work = {"float32": num_seqs * seen * s.num_heads * s.head_dim * 4}
        num_bytes = num_seqs * context * 2 * s.num_kv_heads * pool.shape[4] * pool.element_size()
        call = _around(tables, once, max(1, 50_000_000 // work["float32"]))
        op, shape = f"paged_attention {_name(dtype)}", f"{num_seqs} x {num_rows} @ {context}"
        kept = (pool, shuffled, starts, contexts, q, out)
        return Case(op, shape, num_bytes, work, call, is_cold=True, num_threads=self._threads, kept=kept)

    def store_kv(self, dtype: torch.dtype, rows: tuple[int, ...]) -> Iterator[Case]:
        """Keys and values of new tokens into one layer of a cold pool, at scattered slots. One thread; a step shares
        the rows out."""
        s = self._sizes
        pool = self._pool(dtype, -(-max(rows) // s.block_size))
        cache, width = layer_cache(pool), s.num_kv_heads * s.head_dim
        slots = self._rng.permutation(len(pool) * s.block_size).astype(np.int32)
        numbers = 2 * width
        steps = (
            4 if is_scaled(dtype) else 0 if dtype == torch.float32 else 1
        )  # magnitude, comparison, scaling, rounding
        for num_rows in rows:
            kv = self._floats(num_rows, 2 * width)
            steps_of = [slots.ctypes.data + 4 * first for first in range(0, len(slots) - num_rows + 1, num_rows)]

            def once(slot: int, k: int = kv.ctypes.data, num_rows: int = num_rows) -> None:
                _kernels.store_kv(cache, k, k + 4 * width, 2 * width, 2 * width, slot, num_rows, True)

            num_bytes = num_rows * 2 * s.num_kv_heads * pool.shape[4] * pool.element_size()
            shape = f"{num_rows} x {s.num_kv_heads} x {s.head_dim}"
            call, work = _around(steps_of, once, max(1, 1024 // num_rows)), {"float32": num_rows * numbers * steps}
            kept = (pool, slots, kv)
            yield Case(f"store_kv {_name(dtype)}", shape, num_bytes, work, call, is_cold=True, kept=kept)

    def rms_norm(self, num_rows: int) -> Case:
        """Squares and their sum, then twice scaled: 4 operations a number."""
        n = self._sizes.hidden
        x, weight = self._floats(num_rows, n), self._floats(1, n)[0]
        out = np.empty_like(x)

        def call(passes: int) -> None:
            _kernels.rms_norm(x, weight, 1e-5, out, passes, self._threads, True)

        return self._passes("rms_norm", num_rows, n, 8 * num_rows * n + 4 * n, 4, call)

    def rope(self, num_rows: int) -> Case:
        """Queries and keys: a pair takes 4 multiplications and 2 additions."""
        s = self._sizes
        n = (s.num_heads + s.num_kv_heads) * s.head_dim
        x, angles = self._floats(num_rows, n), self._floats(num_rows, s.head_dim // 2)
        cos, sin = np.cos(angles), np.sin(angles)

        def call(passes: int) -> None:
            _kernels.rope(x, cos, sin, passes, self._threads, True)

        return self._passes("rope", num_rows, n, 8 * num_rows * n + 4 * num_rows * s.head_dim, 3, call)

    def gate_mul(self, op: str, num_rows: int) -> Case:
        """SiLU: sign, exponential, addition, division, multiplication. GELU has a polynomial of 5 more, and no sign."""
        n, is_gelu = self._sizes.intermediate, op == "gelu_mul"
        gate, up = self._floats(num_rows, n), self._floats(num_rows, n)
        out = np.empty_like(gate)

        def call(passes: int) -> None:
            _kernels.gate_mul(gate, up, is_gelu, out, passes, self._threads, True)

        return self._passes(op, num_rows, n, 12 * num_rows * n, 9 if is_gelu else 5, call)

    def prepare(self, fmt: Format, num_rows: int, *, is_normed: bool) -> Case:
        """Activations quantised in groups of 32, as matrices of this format take them: magnitude, comparison, scaling,
        rounding, sum; behind an RMS norm 4 operations more."""
        n = self._sizes.hidden
        groups = -(-n // GROUP)
        x, weight = self._floats(num_rows, n), self._floats(1, n)[0] if is_normed else None
        row_bytes = groups * (8 + GROUP * (2 if fmt == Format.Q8 else 1)) if fmt != Format.F32 else 4 * n
        out = np.empty((num_rows, row_bytes), np.uint8)

        def call(passes: int) -> None:
            _kernels.prepare_rows(int(fmt), x, weight, 1e-5, out, passes, self._threads, True)

        op = f"{'rms_norm + ' if is_normed else ''}prepare {fmt.name.lower()}"
        num_bytes = num_rows * (4 * n + row_bytes) + (4 * n if is_normed else 0)
        return self._passes(op, num_rows, n, num_bytes, 9 if is_normed else 5, call)

    def _passes(
        self, op: str, num_rows: int, width: int, num_bytes: int, steps: int, run: Callable[[int], None]
    ) -> Case:
        """A warm op, which does so many `steps` with each number and repeats itself."""
        passes = max(1, _PASS_BYTES // num_bytes)

        def call() -> int:
            run(passes)
            return passes

        work = {"float32": steps * num_rows * width}
        return Case(op, f"{num_rows} x {width}", num_bytes, work, call, num_threads=self._threads_for(num_rows))

    def _threads_for(self, num_rows: int) -> int:
        return min(self._threads, -(-num_rows // PIECE_ROWS))

    def _floats(self, rows: int, columns: int) -> np.ndarray:
        return self._rng.standard_normal((rows, columns), np.float32)

    def _copies(self, num_bytes: int) -> int:
        return 1 + self._cold_bytes // num_bytes

    def _pool(self, dtype: torch.dtype, least_blocks: int) -> torch.Tensor:
        """One layer's `[num_blocks, kv_heads, 2, block_size, row]`, larger than caches; 64 random blocks repeated."""
        s = self._sizes
        some = torch.from_numpy(self._floats(64 * s.num_kv_heads * 2 * s.block_size, s.head_dim))
        rows = encode_rows(some, dtype).view(64, s.num_kv_heads, 2, s.block_size, -1)
        block_bytes = rows[0].numel() * rows.element_size()
        num_blocks = max(least_blocks, self._copies(block_bytes))
        return rows.view(torch.uint8).repeat(-(-num_blocks // 64), 1, 1, 1, 1)[:num_blocks].view(dtype)


def _around(items: list[T], once: Callable[[T], None], count: int) -> Callable[[], int]:
    """A call that goes on to the next `count` items each time, round and round."""
    turn, count = cycle(items), min(count, len(items))

    def call() -> int:
        for item in islice(turn, count):
            once(item)
        return count

    return call


def _random_weights(rng: np.random.Generator, fmt: Format, outputs: int, inputs: int) -> np.ndarray:
    """Packed; one random block of outputs again and again."""
    shape, groups = (OUTS, inputs), -(-inputs // GROUP)
    scale = rng.random((OUTS, groups)).astype(np.float16)
    if fmt == Format.F32:
        block = pack_f32(rng.standard_normal(shape, np.float32))
    elif fmt == Format.Q8:
        block = pack_q8(rng.integers(-127, 128, shape).astype(np.int8), scale)
    else:
        block = pack_q4(rng.integers(0, 16, shape).astype(np.uint8), scale, -scale)
    return np.tile(block, -(-outputs // OUTS))


def _name(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")
