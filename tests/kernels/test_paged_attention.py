"""Paged attention against the textbook formula, and its promise of equal bits."""

import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops
from kernels.cpu import body as cpu
from kernels.kv_rows import CACHE_DTYPES
from kernels.reference import body as reference
from tests.kernels.paged import expected, fill, make_batch

SCALE = 0.125


def run(attend, batch, num_threads=1, **options):
    out = torch.full_like(batch.q, float("nan"))
    attend(out, batch.q, batch.cache, *batch.metadata, SCALE, num_threads, **options)
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (4, 2)])
def test_a_mixed_batch_equals_the_formula(attend, cache_dtype, heads, kv_heads):
    """Decode rows, a whole prompt and a chunk in the middle, in one call, for every grouping of heads."""
    batch = make_batch([1, 33, 70, 40], [1, 1, 70, 37], heads=heads, kv_heads=kv_heads, dtype=cache_dtype)
    fill(batch, reference.store_kv)
    torch.testing.assert_close(run(attend, batch), expected(batch, SCALE), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("head_dim", [4, 8, 24, 80, 128])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_any_head_dim_and_block_size(attend, head_dim, block_size):
    """A tile of keys may span blocks, or lie within one."""
    batch = make_batch([37, 65], [3, 40], head_dim=head_dim, block_size=block_size)
    fill(batch, reference.store_kv)
    torch.testing.assert_close(run(attend, batch), expected(batch, SCALE), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("window", [1, 5, 31, 32, 33, 64, 100, 1000])
def test_a_window_hides_what_is_older(attend, cache_dtype, window):
    """Decode rows and chunks whose rows' windows begin in different tiles, or before the seq; borders of tiles."""
    batch = make_batch([1, 150, 101, 70], [1, 1, 101, 37], dtype=cache_dtype, head_dim=16)
    fill(batch, reference.store_kv)
    got = run(attend, batch, window=window)
    torch.testing.assert_close(got, expected(batch, SCALE, window=window), rtol=1e-5, atol=3e-6)


def test_tokens_before_every_window_are_not_read(attend_cpp):
    """Whole tiles before it may hold anything: another seq may have their blocks by now."""
    batch = make_batch([200], [9], block_size=32, head_dim=16)
    fill(batch, reference.store_kv)
    for block in batch.tables[0][:5]:  # tokens 0-159; the first row's window begins at 160
        batch.cache[block] = float("nan")
    got = run(attend_cpp, batch, window=32)
    torch.testing.assert_close(got, expected(batch, SCALE, window=32), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("softcap", [0.5, 4.0, 50.0])
def test_scores_are_capped(attend, softcap):
    """cap * tanh(score / cap), for scores far below the cap and far above it."""
    batch = make_batch([70, 40], [70, 1])
    batch.q[::2] *= 30
    fill(batch, reference.store_kv)
    got = run(attend, batch, softcap=softcap, window=50)
    torch.testing.assert_close(got, expected(batch, SCALE, softcap=softcap, window=50), rtol=2e-5, atol=5e-6)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_mix_of_shapes_equals_the_formula(data):
    """Seqs, rows, heads, sizes, types, windows and caps as they come; the last rows of `out` are not touched."""
    contexts = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    rows = [data.draw(st.integers(1, context)) for context in contexts]
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    batch = make_batch(
        contexts,
        rows,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([2, 6, 8, 16, 40, 72])),
        block_size=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from(list(CACHE_DTYPES))),
        seed=data.draw(st.integers(0, 99)),
    )
    fill(batch, reference.store_kv)
    options = {
        "window": data.draw(st.sampled_from([0, 1, 7, 32, 50])),
        "softcap": data.draw(st.sampled_from([0.0, 3.0])),
    }
    out = torch.full((len(batch.q) + 2, *batch.q.shape[1:]), torch.nan)
    attend = partial(cpu.paged_attention, simd=data.draw(st.booleans()), num_threads=data.draw(st.integers(1, 3)))
    attend(out[:-2], batch.q, batch.cache, *batch.metadata, SCALE, **options)
    torch.testing.assert_close(out[:-2], expected(batch, SCALE, **options), rtol=2e-5, atol=5e-6)
    assert out[-2:].isnan().all()


def test_large_scores_do_not_overflow(attend):
    """Scores of some hundreds, rising and falling along the seq, stay finite and right."""
    batch = make_batch([100], [100])
    batch.q *= 60
    fill(batch, reference.store_kv)
    torch.testing.assert_close(run(attend, batch), expected(batch, SCALE), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("token", [0, 40, 99])
def test_a_key_that_is_not_a_number_is_not_overlooked(attend, token, rows):
    """A NaN among a row's keys makes the row NaN, wherever it stands in its tile; rows before it are right."""
    batch = make_batch([100], [rows])
    batch.keys[0][token, :, 3] = torch.nan
    fill(batch, reference.store_kv)
    seen = torch.arange(100 - rows, 100) >= token
    out = run(attend, batch)
    assert out[seen].isnan().all()
    torch.testing.assert_close(out[~seen], expected(batch, SCALE)[~seen], rtol=2e-5, atol=5e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_has_the_same_bits_alone_chunked_and_in_company(data):
    """Neighbours, chunk borders, block ids, block size and threads change no bit of a row's result."""
    context = data.draw(st.integers(1, 140))
    simd = data.draw(st.booleans())
    sizes = st.sampled_from([1, 4, 16, 32])
    dtype = data.draw(st.sampled_from(list(CACHE_DTYPES)))
    whole = make_batch(
        [context], [context], block_size=data.draw(sizes), heads=6, kv_heads=2, head_dim=16, seed=5, dtype=dtype
    )
    fill(whole, reference.store_kv)
    window, softcap = data.draw(st.sampled_from([0, 1, 20, 33, 70])), data.draw(st.sampled_from([0.0, 2.0]))
    attend = partial(cpu.paged_attention, simd=simd, window=window, softcap=softcap)
    want = run(attend, whole)

    end = data.draw(st.integers(1, context))
    rows = data.draw(st.integers(1, end))
    others = data.draw(st.lists(st.integers(1, 50), max_size=3))
    mixed = make_batch(
        [end, *others],
        [rows, *others],
        block_size=data.draw(sizes),
        heads=6,
        kv_heads=2,
        head_dim=16,
        seed=7,
        dtype=dtype,
    )
    mixed.keys[0], mixed.values[0] = whole.keys[0][:end], whole.values[0][:end]
    mixed.q[:rows] = whole.q[end - rows : end]
    fill(mixed, reference.store_kv)
    got = run(attend, mixed, num_threads=data.draw(st.integers(1, 3)))
    assert torch.equal(got[:rows], want[end - rows : end])


def test_many_threads_compute_every_row_once(attend_cpp):
    """The same bits with 1 and 4 threads, again and again (a lost or doubled item would show)."""
    batch = make_batch([300, 7, 90, 64], [300, 1, 45, 64], head_dim=16)
    fill(batch, reference.store_kv)
    want = run(attend_cpp, batch)
    for _ in range(30):
        assert torch.equal(run(attend_cpp, batch, num_threads=4), want)


def test_q_and_out_may_be_columns_of_wider_tensors(attend):
    """A fused projection's output is read where it lies."""
    batch = make_batch([20], [20])
    fill(batch, reference.store_kv)
    wide_q, wide_out = torch.zeros(20, 11, 64), torch.zeros(20, 9, 64)
    wide_q[:, 2:8] = batch.q
    attend(wide_out[:, 1:7], wide_q[:, 2:8], batch.cache, *batch.metadata, SCALE)
    torch.testing.assert_close(wide_out[:, 1:7], expected(batch, SCALE), rtol=1e-5, atol=2e-6)
    assert not wide_out[:, [0, 7, 8]].any()


@pytest.mark.parametrize("bad", [-1, 10_000])
def test_a_block_outside_the_pool_raises(attend_cpp, bad):
    """Table entries that are needed are checked before anything is read."""
    batch = make_batch([40], [1])
    fill(batch, reference.store_kv)
    batch.tables[0][1] = bad
    with pytest.raises(IndexError, match="outside the pool"):
        run(attend_cpp, batch)


def test_a_table_shorter_than_its_context_raises(attend_cpp):
    """A table that does not cover the context is refused."""
    batch = make_batch([40], [1])
    fill(batch, reference.store_kv)
    batch.tables[0].pop()
    with pytest.raises(IndexError, match="no such rows or blocks"):
        run(attend_cpp, batch)


def test_the_dispatcher_runs_the_compiled_body():
    """Where the extension is built, the ops use it; and they refuse mismatched arguments."""
    assert ops.body_name() in ("avx2", "scalar")
    batch = make_batch([40, 3], [2, 3])
    fill(batch, ops.store_kv)
    torch.testing.assert_close(run(ops.paged_attention, batch), expected(batch, SCALE), rtol=1e-5, atol=2e-6)
    tables, starts, contexts = batch.metadata
    out = torch.empty_like(batch.q)
    for args in [(tables[:1], starts, contexts), (tables, starts[:2], contexts), (tables, starts, contexts.long())]:
        with pytest.raises(AssertionError):
            ops.paged_attention(out, batch.q, batch.cache, *args, SCALE)


def test_without_the_extension_the_reference_runs(monkeypatch):
    """A tree where nothing was compiled still computes; a broken extension is an error, not a slow answer."""
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    assert ops._compiled_body() is None
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "kernels.cpu.body", None)
    with pytest.raises(ImportError):
        ops._compiled_body()
