"""The ops in plain torch. Signatures and meanings are those of `kernels.ops`."""

import torch

from kernels.kv_rows import decode_rows, encode_rows


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `kernels.ops.store_kv`."""
    block_size = cache.shape[3]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks, offsets = slots // block_size, slots % block_size
    raw = cache.view(torch.uint8)  # torch does not index 8-bit floats
    raw[blocks, :, 0, offsets] = encode_rows(k[kept], cache.dtype).view(torch.uint8)
    raw[blocks, :, 1, offsets] = encode_rows(v[kept], cache.dtype).view(torch.uint8)


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
    """See `kernels.ops.paged_attention`. One seq after the other, the whole score matrix at once."""
    block_size, group = cache.shape[3], q.shape[1] // cache.shape[1]
    raw = cache.view(torch.uint8)
    starts = query_start.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        start, end = starts[seq], starts[seq + 1]
        table = block_tables[seq, : -(-context // block_size)].long()
        # [blocks, kv_heads, 2, block_size, row] -> [2, kv_heads, context, head_dim]
        rows = raw[table].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context].contiguous()
        kv = decode_rows(rows.view(cache.dtype))
        keys, values = kv.repeat_interleave(group, dim=1)  # [heads, context, head_dim]
        scores = torch.einsum("rhd,hcd->hrc", q[start:end] * scale, keys)
        positions = torch.arange(context - (end - start), context)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        tokens = torch.arange(context)[None, :]
        hidden = tokens > positions[:, None]
        if window:
            hidden |= tokens <= positions[:, None] - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hrc,hcd->rhd", weights, values)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """See `kernels.ops.rms_norm`."""
    scale = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    torch.mul(x, scale, out=out)
    out *= weight


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `kernels.ops.rope`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = first * cos - second * sin
    second.mul_(cos).add_(first * sin)
    first.copy_(rotated)


def silu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """See `kernels.ops.silu_mul`."""
    width = gate_up.shape[-1] // 2
    torch.mul(torch.nn.functional.silu(gate_up[..., :width]), gate_up[..., width:], out=out)


def gelu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """See `kernels.ops.gelu_mul`."""
    width = gate_up.shape[-1] // 2
    torch.mul(torch.nn.functional.gelu(gate_up[..., :width], approximate="tanh"), gate_up[..., width:], out=out)
