"""The benchmark's arithmetic: what it says of an op follows from its watch, and from bytes and operations by hand."""

import inspect
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from kernels import ops, sampling
from kernels.bench import Case, Ceilings, judge, measure
from kernels.bench_cases import ADD, SILU_MUL, STORE, ModelCases, Sizes
from kernels.bench_sampling import SamplingCases
from kernels.packing import Format

SIZES = Sizes(hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab=80, block_size=16)
ROWS = (1, 16)
SMALL = 1 << 12


@pytest.fixture
def cases() -> ModelCases:
    return ModelCases(SIZES, num_threads=4, cold_bytes=SMALL)


class SomeCeilings(Ceilings):
    """10 GOP/s in float32, 40 in int8, of each thread; memory 2 GB/s, a cache that holds 20 KiB 100 GB/s."""

    def __init__(self) -> None:
        self.gops = lambda kind, num_threads: {"float32": 10.0, "int8": 40.0}[kind] * num_threads
        self.read_gbs = lambda num_threads, kib=0: 100.0 if 0 < kib <= 20 else 2.0

    def flush(self) -> None:
        pass


def cost(case: Case) -> tuple[str, int, dict[str, int]]:
    return case.shape, case.num_bytes, dict(case.work)


def test_rates_follow_from_the_watch():
    """With a watch that ticks a second per look, a call takes a second, and each of what it says it did its part."""
    ticks = count()
    case = Case("op", "shape", 3_000_000_000, {"float32": 2_000_000_000}, lambda: 4, is_cold=True)
    (timing,) = measure([case], SomeCeilings(), lambda: float(next(ticks)), repeats=3)
    assert timing.microseconds == pytest.approx(250_000)
    assert timing.gbs == pytest.approx(12)
    assert timing.gops == pytest.approx(8)
    assert timing.bound == "memory"
    assert timing.share == pytest.approx(6)  # 1.5 s of reading at 2 GB/s, done in a quarter of a second


@pytest.mark.parametrize(
    ("num_bytes", "work", "is_cold", "threads", "bound", "share"),
    [
        (1000, {"float32": 10_000}, True, 1, "float32", 0.1),
        (4000, {"float32": 10_000}, True, 1, "memory", 0.2),
        (4000, {"float32": 10_000}, False, 1, "float32", 0.1),  # warm: 40 ns from a cache, 1000 of arithmetic
        (4000, {"float32": 10}, False, 1, "reading 4 KiB", 0.004),
        (40_000, {}, False, 1, "reading 40 KiB", 2.0),  # from memory, 20 us in this machine
        (40_000, {}, False, 2, "reading 20 KiB", 0.04),  # each thread goes over a half
        (1000, {"float32": 10_000, "int8": 80_000}, True, 1, "arithmetic", 0.3),
        (1000, {"float32": 10_000, "int8": 80_000}, True, 2, "arithmetic", 0.15),
    ],
)
def test_the_slower_ceiling_is_what_bounds_an_op(num_bytes, work, is_cold, threads, bound, share):
    """Memory or arithmetic, whichever takes longer at its best, against the 10 microseconds that the op took."""
    case = Case("op", "shape", num_bytes, work, lambda: 1, is_cold=is_cold, num_threads=threads)
    timing = judge(case, 10e-6, SomeCeilings())
    assert (timing.bound, timing.share) == (bound, pytest.approx(share))


def test_without_a_measured_ceiling_there_is_no_share():
    """As on a CPU that has no loop for it: times are told all the same."""
    ceilings = SomeCeilings()
    ceilings.gops = lambda kind, num_threads: 0.0
    ceilings.read_gbs = lambda num_threads, kib=0: 0.0
    timing = judge(Case("op", "shape", 1000, {"int8": 500}, lambda: 1), 1e-6, ceilings)
    assert (timing.bound, timing.share) == ("", 0.0)
    assert (timing.gbs, timing.gops) == (pytest.approx(1.0), pytest.approx(0.5))


def test_a_product_reads_its_weights(cases: ModelCases):
    """A q4 tile of 16 outputs and 32 inputs has 256 bytes of numbers, 64 of scales and minima; q8 512 and 32."""
    one, many = cases.linear("linear", Format.Q4, 64, 80, STORE, ROWS)
    assert cost(one) == ("1 x 64 -> 80", 5 * 2 * 320, {"int8": 2 * 64 * 80})
    assert cost(many) == ("16 x 64 -> 80", 5 * 2 * 320, {"int8": 16 * 2 * 64 * 80})
    gated, _ = cases.linear("linear", Format.Q8, 64, 192, SILU_MUL, ROWS)
    assert cost(gated) == ("1 x 64 -> 192", 12 * 2 * 544, {"int16": 2 * 64 * 192})
    exact, _ = cases.linear("linear", Format.F32, 96, 64, ADD, ROWS)
    assert cost(exact) == ("1 x 96 -> 64", 4 * 96 * 64, {"float32": 2 * 96 * 64})
    assert all(case.is_cold and case.num_threads == 4 for case in (one, many, gated, exact))


def test_an_embedding_row_is_a_sixteenth_of_its_block(cases: ModelCases):
    """64 numbers of one byte and two half-precision scales, one multiplication each."""
    one, many = cases.embedding(Format.Q8, ROWS)
    assert cost(one) == ("1 x 64", 64 + 2 * 2, {"float32": 64})
    assert cost(many) == ("16 x 64", 16 * 68, {"float32": 16 * 64})
    assert (one.num_threads, many.num_threads) == (1, 2)  # eight rows to a thread


def test_attention_reads_every_key_and_value_once(cases: ModelCases):
    """A (row, token) pair of a head takes 2 operations a dimension for its score and 2 for its value."""
    decode = cases.attention(3, 1, 40, torch.float16)
    assert cost(decode) == ("3 x 1 @ 40", 3 * 40 * 2 * 2 * 16 * 2, {"float32": 3 * 40 * 4 * 16 * 4})
    chunk = cases.attention(1, 4, 10, torch.int8)  # rows see 7, 8, 9 and 10 tokens; a row of 16 bytes has a scale of 4
    assert cost(chunk) == ("1 x 4 @ 10", 10 * 2 * 2 * 20, {"float32": (7 + 8 + 9 + 10) * 4 * 16 * 4})


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "steps"), [(torch.float32, 64, 0), (torch.bfloat16, 32, 1), (torch.float8_e4m3fn, 20, 4)]
)
def test_storing_writes_a_key_and_a_value_of_each_head(cases: ModelCases, dtype, row_bytes: int, steps: int):
    """Rows of 16 numbers, of 4, 2 or 1 byte, the last with their scale."""
    _, many = cases.store_kv(dtype, ROWS)
    assert cost(many) == ("16 x 2 x 16", 16 * 2 * 2 * row_bytes, {"float32": 16 * 2 * 2 * 16 * steps})


def test_rowwise_ops_read_and_write_their_rows(cases: ModelCases):
    """All float32 but the quantised rows, which have 8 bytes beside 32 numbers; weights and angles are read too."""
    assert cost(cases.rms_norm(16)) == ("16 x 64", 4 * (16 * 64 * 2 + 64), {"float32": 4 * 16 * 64})
    assert cost(cases.rope(16)) == ("16 x 96", 4 * (16 * 96 * 2 + 16 * 2 * 8), {"float32": 16 * 6 * 8 * 6})
    assert cost(cases.gate_mul("silu_mul", 16)) == ("16 x 96", 4 * 16 * 96 * 3, {"float32": 5 * 16 * 96})
    assert cost(cases.gate_mul("gelu_mul", 1)) == ("1 x 96", 4 * 96 * 3, {"float32": 9 * 96})
    q4, q8 = cases.prepare(Format.Q4, 16, is_normed=False), cases.prepare(Format.Q8, 16, is_normed=True)
    assert cost(q4) == ("16 x 64", 16 * (64 * 4 + 2 * 40), {"float32": 5 * 16 * 64})
    assert cost(q8) == ("16 x 64", 16 * (64 * 4 + 2 * 72) + 64 * 4, {"float32": 9 * 16 * 64})
    assert not q8.is_cold


def test_sampling_reads_its_logits():
    """Of two rows of 80 tokens; a mask has 3 words a row; 16 biases and 320 tokens of a seq are looked up."""
    cases = SamplingCases(80, num_threads=4, rows=(2,))
    assert cost(cases.draw("draw_tokens", 2, top_k=5, top_p=0.5)) == ("2 x 80", 2 * 80 * 4, {"float32": 2 * 80 * 5})
    assert cost(cases.tell(2)) == ("2 x 80", 2 * 80 * 4, {"float32": 2 * 80 * 6})
    assert cost(cases.mask(2)) == ("2 x 80", 2 * (3 * 4 + 40 * 4), {"float32": 2 * 80})
    assert cost(cases.adjust(2)) == ("2 x 80", 2 * (16 * 16 + 320 * 12), {"float32": 2 * (16 + 320 * 6)})
    assert cases.mask(2).num_threads == 2  # a row to a thread


def _small_cases() -> Iterator[Case]:
    yield from ModelCases(SIZES, num_threads=2, cold_bytes=SMALL).all()
    yield from SamplingCases(SIZES.vocab, num_threads=2).all()


def test_every_op_of_the_dispatcher_is_timed():
    """The public functions of the modules that have ops, each at 1, 16 and 128 rows; and each case runs."""
    rows: dict[str, set[str]] = {}
    for case in _small_cases():
        rows.setdefault(case.op.split()[0], set()).add(case.shape.split()[0])
        assert case.num_bytes > 0
        assert case.call() >= 1
    wanted = {
        name
        for module in (ops, sampling)
        for name, op in inspect.getmembers(module, inspect.isfunction)
        if op.__module__ == module.__name__ and not name.startswith("_")
    } - {"body_name"}
    assert len(wanted) == 10
    assert wanted | {"linear", "embedding"} <= set(rows)
    assert all(seen == {"1", "16", "128"} for seen in rows.values())
