"""How the KV pool keeps a row: one token's keys, or values, of one head.

The pool's dtype says how. Floats are `head_dim` numbers. An int8 or float8 (e4m3) row is `head_dim` bytes and then its
float32 scale, written with it and never changed: `value = number * scale`, and the row's largest magnitude is the
type's largest number. So the last dim of such a pool is `head_dim + SCALE_BYTES` items of one byte.
"""

import torch

CACHE_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
"""Each with its number in kernels/cpu/tile.h."""

SCALE_BYTES = 4
_TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_TINY, _LARGEST = 1e-30, torch.finfo(torch.float32).max


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether rows of this type end with a scale."""
    return dtype in _TOP


def row_items(head_dim: int, dtype: torch.dtype) -> int:
    """The pool's last dim."""
    return head_dim + SCALE_BYTES if is_scaled(dtype) else head_dim


def head_dim_of(cache: torch.Tensor) -> int:
    """Of a pool, or a part of one, whose last dim is a row."""
    return cache.shape[-1] - SCALE_BYTES if is_scaled(cache.dtype) else cache.shape[-1]


def encode_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """:param x: float32 `[..., head_dim]`. :returns: `[..., row_items]` of `dtype`; a row with a number that is not
    finite is read back as NaN."""
    if not is_scaled(dtype):
        return x.to(dtype)
    most = x.abs().amax(dim=-1, keepdim=True)
    usable = (most > _TINY) & (most <= _LARGEST)
    inverse, scale = torch.where(usable, _TOP[dtype] / most, 0.0), torch.where(most > _TINY, most / _TOP[dtype], 0.0)
    scale = torch.where(usable | (most <= _TINY), scale, most)
    numbers = torch.where(usable, x * inverse, 0.0)
    numbers = numbers.round() if dtype == torch.int8 else numbers
    return torch.cat([numbers.to(dtype).view(torch.uint8), scale.contiguous().view(torch.uint8)], dim=-1).view(dtype)


def decode_rows(rows: torch.Tensor) -> torch.Tensor:
    """:returns: float32 `[..., head_dim]`."""
    if not is_scaled(rows.dtype):
        return rows.float()
    head_dim = head_dim_of(rows)
    # A clone begins at its storage's start, as a view in a wider type must; `contiguous` may give the slice itself.
    last = rows.view(torch.uint8)[..., head_dim:].clone(memory_format=torch.contiguous_format)
    scale = last.view(torch.float32)
    return rows[..., :head_dim].float() * scale
