"""Hands checked tensors to the C++ kernels as addresses and strides. Called by `kernels.ops` only."""

import torch

from kernels.cpu import _kernels
from kernels.kv_rows import CACHE_DTYPES, head_dim_of


def simd_name() -> str:
    """Instruction set in use on this CPU: `avx2` or `scalar`."""
    return _kernels.simd_name()


def store_kv(
    k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, *, simd: bool = True
) -> None:
    """See `kernels.ops.store_kv`. `simd=False` takes the scalar body."""
    _kernels.store_kv(
        layer_cache(cache),
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        v.stride(0),
        slot_mapping.data_ptr(),
        slot_mapping.shape[0],
        simd,
    )


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_threads: int = 1,
    *,
    window: int = 0,
    softcap: float = 0.0,
    simd: bool = True,
) -> None:
    """See `kernels.ops.paged_attention`. `simd=False` takes the scalar body."""
    _kernels.paged_attention(
        layer_cache(cache),
        out.data_ptr(),
        q.data_ptr(),
        out.stride(0),
        q.stride(0),
        q.shape[1],
        block_tables.data_ptr(),
        block_tables.shape[0],
        block_tables.shape[1],
        query_start.data_ptr(),
        context_lens.data_ptr(),
        scale,
        window,
        softcap,
        num_threads,
        simd,
    )


def layer_cache(cache: torch.Tensor) -> _kernels.LayerCache:
    """One layer's view of a pool, as the kernels take it. Does not keep `cache`."""
    num_blocks, num_kv_heads, _, block_size, _ = cache.shape
    block_stride, head_stride, kv_stride, token_stride, _ = cache.stride()
    return _kernels.LayerCache(
        cache.data_ptr(),
        CACHE_DTYPES[cache.dtype],
        num_blocks,
        num_kv_heads,
        block_size,
        head_dim_of(cache),
        block_stride,
        head_stride,
        kv_stride,
        token_stride,
    )
