"""The one dispatcher. Shapes, strides and dtypes are checked here, before any body runs.

Outputs are passed in. A layer's cache is a view `pool[:, :, layer]` of the block-major pool, shape
`[num_blocks, num_kv_heads, 2, block_size, row]` (2 = key, value) of one of `CACHE_DTYPES`; a row is `head_dim` numbers,
and in an 8-bit pool a scale behind them (`kernels.kv_rows`).
A wrong shape is the caller's bug and asserts; an id outside the pool raises IndexError before a byte moves.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from kernels.kv_rows import CACHE_DTYPES, head_dim_of
from kernels.reference import body as reference


def _compiled_body() -> ModuleType | None:
    """The C++ bodies, or None where the extension was not built. One that was built but does not load raises: the
    reference would answer too, a hundred times slower."""
    if find_spec("kernels.cpu._kernels") is None:
        return None
    return import_module("kernels.cpu.body")


_cpu = _compiled_body()
_paged: ModuleType = _cpu if _cpu is not None else reference


def body_name() -> str:
    """What runs the paged ops in this process: `avx2`, `scalar` (both C++) or `reference` (torch)."""
    return _cpu.simd_name() if _cpu is not None else "reference"


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write keys and values of new tokens into one layer's cache. Mutates `cache`.

    :param k, v: float32 `[num_tokens, num_kv_heads, head_dim]`, dense but for the first stride.
    :param slot_mapping: int32 `[num_tokens]`, `block_id * block_size + offset`; -1 is padding.
    :raises IndexError: a slot is outside the pool; nothing was written.
    """
    _check_cache(cache)
    assert k.shape == v.shape == (slot_mapping.shape[0], cache.shape[1], head_dim_of(cache)), "k, v: shape"
    assert _dense_rows(k, v), "k, v: float32, heads contiguous"
    assert _is_index(slot_mapping, 1), "slot_mapping: contiguous int32"
    _paged.store_kv(k, v, cache, slot_mapping)


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
) -> None:
    """Causal attention of new rows over paged keys and values, many seqs of any mix in one call. Mutates `out`.

    The rows of seq s are `query_start[s]:query_start[s + 1]`; they are its last tokens, so the last row sees
    all `context_lens[s]` tokens. Their own keys and values must be in the cache already. Grouped heads: query
    head h reads KV head `h // (num_heads / num_kv_heads)`. In the C++ bodies a row's result has the same bits
    whatever the other rows, the chunking and `num_threads`; in the reference only nearly so.

    :param out, q: float32 `[num_rows, num_heads, head_dim]`, dense but for the first stride.
    :param block_tables: int32 `[num_seqs, max_blocks]`, ids in order; only entries that `context_lens` needs are read.
    :param query_start: int32 `[num_seqs + 1]`, ascending from 0 to num_rows.
    :param context_lens: int32 `[num_seqs]`, tokens of each seq, its new rows included.
    :param window: a row sees the last so many tokens, itself included; 0 is all of them.
    :param softcap: scores become `softcap * tanh(score / softcap)` (Bello et al. 2016); 0 leaves them.
    :raises IndexError: a block id is outside the pool, or a table is too short; `out` is untouched.
    """
    _check_cache(cache)
    num_seqs = context_lens.shape[0]
    assert q.shape == out.shape == (q.shape[0], q.shape[1], head_dim_of(cache)), "q, out: shape"
    assert q.shape[1] % cache.shape[1] == 0, "q: heads are a multiple of KV heads"
    assert _dense_rows(q, out), "q, out: float32, heads contiguous"
    assert _is_index(block_tables, 2), "block_tables: contiguous int32"
    assert block_tables.shape[0] == num_seqs, "block_tables: [num_seqs, max_blocks]"
    assert _is_index(query_start, 1), "query_start: contiguous int32"
    assert query_start.shape[0] == num_seqs + 1, "query_start: [num_seqs + 1]"
    assert _is_index(context_lens, 1), "context_lens: contiguous int32"
    assert int(query_start[-1]) == q.shape[0], "query_start: must end at num_rows"
    assert window >= 0, "window: tokens"
    _paged.paged_attention(
        out, q, cache, block_tables, query_start, context_lens, scale, num_threads, window=window, softcap=softcap
    )


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """`out = x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang and Sennrich 2019). Mutates `out`,
    which may not be `x`.

    :param out, x: float32 `[num_rows, hidden]`. :param weight: float32 `[hidden]`.
    """
    assert out.shape == x.shape
    assert weight.shape == x.shape[-1:]
    assert out is not x
    reference.rms_norm(out, x, weight, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate each head by its row's position (Su et al. 2021), pairs (i, i + head_dim / 2). Mutates `x`.

    :param x: float32 `[num_rows, num_heads, head_dim]`, any strides.
    :param cos, sin: float32 `[num_rows, head_dim / 2]`, of each row's position.
    """
    assert cos.shape == sin.shape == (x.shape[0], x.shape[2] // 2)
    reference.rope(x, cos, sin)


def silu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """`out = silu(gate) * up` (Shazeer 2020). Mutates `out`.

    :param out: float32 `[num_rows, width]`. :param gate_up: float32 `[num_rows, 2 * width]`, gate first.
    """
    assert gate_up.shape == (out.shape[0], 2 * out.shape[1])
    reference.silu_mul(out, gate_up)


def gelu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """`out = gelu(gate) * up` with GELU's tanh form (Hendrycks and Gimpel 2016). Mutates `out`. Shapes: `silu_mul`."""
    assert gate_up.shape == (out.shape[0], 2 * out.shape[1])
    reference.gelu_mul(out, gate_up)


def _check_cache(cache: torch.Tensor) -> None:
    assert cache.dim() == 5, "cache: [num_blocks, num_kv_heads, 2, block_size, row]"
    assert cache.shape[2] == 2, "cache: dim 2 is key and value"
    assert cache.dtype in CACHE_DTYPES, "cache: dtype"
    assert cache.stride(4) == 1, "cache: rows contiguous"
    assert cache.device.type == "cpu", "cache: device"


def _dense_rows(*tensors: torch.Tensor) -> bool:
    """Whether `[rows, heads, head_dim]` tensors are float32 with their heads side by side."""
    return all(
        x.dtype == torch.float32 and x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
        for x in tensors
    )


def _is_index(x: torch.Tensor, dims: int) -> bool:
    return x.dtype == torch.int32 and x.dim() == dims and x.is_contiguous()
