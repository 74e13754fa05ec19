"""Storing keys and values into the paged pool."""

import pytest
import torch

from kernels import ops
from kernels.cpu import body as cpu
from tests.kernels.paged import LAYER, make_batch


def test_tokens_land_in_their_slots_and_nowhere_else(store, cache_dtype):
    """Each token's key and value are found at its slot of its layer; every other byte is as before."""
    batch = make_batch([21, 5], [1, 1], block_size=8, dtype=cache_dtype)
    before = batch.pool.clone()
    for seq in (0, 1):
        store(batch.keys[seq], batch.values[seq], batch.cache, batch.slots(seq))
    want = before
    for seq in (0, 1):
        for position, slot in enumerate(batch.slots(seq).tolist()):
            want[slot // 8, :, LAYER, 0, slot % 8] = batch.keys[seq][position].to(cache_dtype)
            want[slot // 8, :, LAYER, 1, slot % 8] = batch.values[seq][position].to(cache_dtype)
    torch.testing.assert_close(batch.pool, want, rtol=0, atol=0, equal_nan=True)


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
    torch.testing.assert_close(batch.pool, before, rtol=0, atol=0, equal_nan=True)


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
