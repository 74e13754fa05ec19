"""Storing keys and values into the paged pool."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops
from kernels.cpu import body as cpu
from kernels.kv_rows import CACHE_DTYPES, decode_rows, encode_rows, row_items
from kernels.reference import body as reference
from tests.kernels.paged import LAYER, make_batch


def test_tokens_land_in_their_slots_and_nowhere_else(store, cache_dtype):
    """Each token's key and value are found at its slot of its layer; every other byte is as before."""
    batch = make_batch([21, 5], [1, 1], block_size=8, dtype=cache_dtype)
    want = batch.pool.clone().view(torch.uint8)
    for seq in (0, 1):
        store(batch.keys[seq], batch.values[seq], batch.cache, batch.slots(seq))
    for seq in (0, 1):
        for position, slot in enumerate(batch.slots(seq).tolist()):
            for kv, rows in enumerate((batch.keys, batch.values)):
                kept = encode_rows(rows[seq][position], cache_dtype).view(torch.uint8)
                want[slot // 8, :, LAYER, kv, slot % 8] = kept
    assert torch.equal(batch.pool.view(torch.uint8), want)


def test_padding_is_not_stored(store):
    """Slot -1 writes nothing."""
    batch = make_batch([3], [1])
    before = batch.pool.clone()
    store(batch.keys[0], batch.values[0], batch.cache, torch.full((3,), -1, dtype=torch.int32))
    torch.testing.assert_close(batch.pool, before, rtol=0, atol=0, equal_nan=True)


def test_slices_of_a_wider_tensor_are_stored(store):
    """Keys and values may be columns of one projection's output."""
    batch = make_batch([4], [1], block_size=4)
    wide = torch.randn(4, 6, 64)
    store(wide[:, 1:3], wide[:, 3:5], batch.cache, batch.slots(0))
    got = batch.cache[batch.tables[0][0]]  # [kv_heads, 2, block_size, head_dim]
    assert torch.equal(got[:, 0].transpose(0, 1), wide[:, 1:3])
    assert torch.equal(got[:, 1].transpose(0, 1), wide[:, 3:5])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows_land_as_the_reference_puts_them(data):
    """Bit for bit, over shapes, strides, types, layers and padding; nothing else in the pool is touched."""
    kv_heads, head_dim = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([2, 7, 8, 24, 64, 72]))
    block_size, num_blocks = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from(list(CACHE_DTYPES)))
    count = data.draw(st.integers(0, num_blocks * block_size))
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    wide = torch.randn(count, 2 * kv_heads + 3, head_dim, generator=gen) * 10
    k, v = wide[:, 1 : 1 + kv_heads], wide[:, 2 + kv_heads : 2 + 2 * kv_heads]
    slots = torch.randperm(num_blocks * block_size, generator=gen)[:count].int()
    slots[torch.rand(count, generator=gen) < 0.2] = -1
    shape = (num_blocks, kv_heads, 3, 2, block_size, row_items(head_dim, dtype) * dtype.itemsize)
    pools = [torch.full(shape, 255, dtype=torch.uint8).view(dtype) for _ in range(2)]
    layer = data.draw(st.integers(0, 2))
    cpu.store_kv(k, v, pools[0][:, :, layer], slots, simd=data.draw(st.booleans()))
    reference.store_kv(k, v, pools[1][:, :, layer], slots)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))


@pytest.mark.parametrize("simd", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_rounding_case_equals_torch(dtype, simd):
    """Ties, subnormals, overflow, infinities and both zeros round as torch rounds them."""
    every_half = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = every_half[every_half.isfinite()]
    nudged = [finite, finite * (1 + 2**-11), finite * (1 + 2**-9), finite * (1 - 2**-12), finite * 3.0, finite / 3.0]
    midpoints = (finite.sort().values[1:] + finite.sort().values[:-1]) / 2
    x = torch.cat([*nudged, midpoints, torch.tensor([torch.inf, -torch.inf, 65519.0, 65520.0, 1e-8, -1e-8])])
    x = torch.cat([x, torch.zeros(-len(x) % 64)]).view(-1, 1, 64)
    cache = torch.zeros(len(x), 1, 2, 1, 64, dtype=dtype)
    cpu.store_kv(x, x, cache, torch.arange(len(x), dtype=torch.int32), simd=simd)
    assert torch.equal(cache[:, :, 0, 0].view(torch.int16), x.to(dtype).view(torch.int16))


def test_a_slot_outside_the_pool_raises_and_writes_nothing(cache_dtype):
    """All slots are checked before the first byte moves."""
    batch = make_batch([3], [1], dtype=cache_dtype)
    before = batch.pool.clone()
    slots = batch.slots(0)
    slots[2] = batch.cache.shape[0] * 16
    with pytest.raises(IndexError, match="outside the pool"):
        cpu.store_kv(batch.keys[0], batch.values[0], batch.cache, slots)
    assert torch.equal(batch.pool.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("simd", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bit_rows_equal_the_reference(dtype, simd):
    """Bit for bit, number and scale: rows of very different sizes, ties, tiny numbers, zeros."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(600, 1, 64, generator=gen) * 10.0 ** torch.randint(-25, 25, (600, 1, 1), generator=gen)
    x[::7] = x[::7].sign() * 2.0 ** torch.randint(-14, 9, x[::7].shape, generator=gen)  # down to subnormal e4m3
    x[1::7] = torch.randint(-254, 255, x[1::7].shape, generator=gen).float() / 2  # halves: ties
    x[1::7, :, 0] = 127.0
    ties = torch.arange(-895, 897, 2).float().view(-1, 1, 64)  # between two numbers of 448's binade
    x = torch.cat([x, ties.clamp(-448, 448), torch.zeros(1, 1, 64), torch.full((1, 1, 64), 1e-38)])
    cache = torch.zeros(len(x), 1, 2, 1, 68, dtype=torch.uint8).view(dtype)
    cpu.store_kv(x, -x, cache, torch.arange(len(x), dtype=torch.int32), simd=simd)
    assert torch.equal(cache[:, :, 0, 0].view(torch.uint8), encode_rows(x, dtype).view(torch.uint8))
    assert torch.equal(cache[:, :, 1, 0].view(torch.uint8), encode_rows(-x, dtype).view(torch.uint8))
    error = (decode_rows(encode_rows(x, dtype)) - x).abs()
    most = x.abs().amax(-1, keepdim=True)
    step = most / 254 if dtype == torch.int8 else x.abs() / 16
    floor = most * 2.0**-18 + 1e-30
    assert (error <= step * 1.001 + floor).all()


@pytest.mark.parametrize("head_dim", [2, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_one_row_alone_is_read_back(dtype, head_dim: int):
    """Where its scale lies at any byte: nothing but rounding is lost."""
    x = torch.linspace(-1, 1, head_dim).view(1, 1, head_dim)
    torch.testing.assert_close(decode_rows(encode_rows(x, dtype)), x, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_row_that_is_not_finite_is_read_as_nan(store, dtype, bad):
    """A broken key must not be rounded into a number; its neighbours stay."""
    k = torch.randn(3, 2, 16)
    k[1, 0, 5] = bad
    cache = torch.zeros(1, 2, 2, 4, 20, dtype=torch.uint8).view(dtype)
    store(k, k, cache, torch.arange(3, dtype=torch.int32))
    kept = decode_rows(cache[0, :, 0, :3])
    assert kept[0, 1].isnan().all()
    assert kept[0, [0, 2]].isfinite().all()
    assert kept[1].isfinite().all()


@pytest.mark.parametrize("simd", [True, False])
def test_every_eight_bit_float_is_read_as_torch_reads_it(simd):
    """All finite e4m3 numbers, one per row beside the largest: attention over a single token returns its value."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    rows = torch.zeros(len(every), 1, 2, 1, 12, dtype=torch.uint8)
    rows[:, 0, 1, 0, 3] = every
    rows[..., 8:] = torch.tensor([1.5]).view(torch.uint8)
    count = len(every)
    tables = torch.arange(count, dtype=torch.int32)[:, None].contiguous()
    out = torch.full((count, 1, 8), torch.nan)
    starts, ones = torch.arange(count + 1, dtype=torch.int32), torch.ones(count, dtype=torch.int32)
    cache = rows.view(torch.float8_e4m3fn)
    cpu.paged_attention(out, torch.zeros(count, 1, 8), cache, tables, starts, ones, 1.0, simd=simd)
    assert torch.equal(out[:, 0, 3], every.view(torch.float8_e4m3fn).float() * 1.5)


def test_wrong_shapes_and_dtypes_are_refused_before_launch():
    """The dispatcher asserts on a caller's bug."""
    batch = make_batch([3], [1])
    k, v, slots = batch.keys[0], batch.values[0], batch.slots(0)
    wrong = [
        (k[:2], v, batch.cache, slots),
        (k.double(), v.double(), batch.cache, slots),
        (k, v, batch.cache.double(), slots),
        (k, v, batch.cache, slots.long()),
        (k.transpose(1, 2).contiguous().transpose(1, 2), v, batch.cache, slots),
        (k, v, batch.cache[0], slots),
    ]
    for args in wrong:
        with pytest.raises(AssertionError):
            ops.store_kv(*args)
