"""A random paged batch, and attention over it by the textbook formula in float64."""

from dataclasses import dataclass

import torch

from kernels.kv_rows import decode_rows, encode_rows, row_items

NUM_LAYERS, LAYER = 3, 1


@dataclass
class PagedBatch:
    """Seqs of `contexts` tokens whose last `rows` are new, scattered over a block-major pool."""

    pool: torch.Tensor  # [num_blocks, kv_heads, layers, 2, block_size, row]
    cache: torch.Tensor  # one layer's view
    q: torch.Tensor  # [num_rows, heads, head_dim]
    keys: list[torch.Tensor]  # per seq [context, kv_heads, head_dim]
    values: list[torch.Tensor]
    tables: list[list[int]]
    contexts: list[int]
    rows: list[int]

    @property
    def metadata(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_tables, query_start, context_lens."""
        width = max(len(t) for t in self.tables)
        padded = [t + [-1] * (width - len(t)) for t in self.tables]
        starts = torch.tensor([0, *self.rows]).cumsum(0)
        as_int = lambda x: torch.as_tensor(x, dtype=torch.int32)  # noqa: E731
        return as_int(padded), as_int(starts), as_int(self.contexts)

    def slots(self, seq: int) -> torch.Tensor:
        size = self.cache.shape[3]
        return torch.tensor([self.tables[seq][p // size] * size + p % size for p in range(self.contexts[seq])]).int()


def make_batch(
    contexts: list[int],
    rows: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedBatch:
    """Random keys, values and queries. The pool is NaN wherever no token lives, so that a stray read shows."""
    gen = torch.Generator().manual_seed(seed)
    needed = [-(-c // block_size) for c in contexts]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=gen).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    num_bytes = row_items(head_dim, dtype) * dtype.itemsize
    pool = torch.full((num_blocks, kv_heads, NUM_LAYERS, 2, block_size, num_bytes), 255, dtype=torch.uint8).view(dtype)
    shape = (kv_heads, head_dim)
    keys = [_as_kept(torch.randn(c, *shape, generator=gen), dtype) for c in contexts]
    values = [_as_kept(torch.randn(c, *shape, generator=gen), dtype) for c in contexts]
    q = torch.randn(sum(rows), heads, head_dim, generator=gen)
    return PagedBatch(pool, pool[:, :, LAYER], q, keys, values, tables, contexts, rows)


def _as_kept(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to what the pool can hold, so that nothing but the arithmetic may differ."""
    return decode_rows(encode_rows(x, dtype))


def fill(batch: PagedBatch, store) -> None:
    for seq in range(len(batch.contexts)):
        store(batch.keys[seq], batch.values[seq], batch.cache, batch.slots(seq))


def expected(batch: PagedBatch, scale: float, *, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    """softmax(q k^T scale) v, row by row, in float64, from the dense keys and values of the tokens in the window."""
    out, first = torch.empty_like(batch.q), 0
    group = batch.q.shape[1] // batch.cache.shape[1]
    for seq, (context, rows) in enumerate(zip(batch.contexts, batch.rows, strict=True)):
        for r in range(rows):
            end = context - rows + r + 1
            seen = slice(max(0, end - window) if window else 0, end)
            for head in range(batch.q.shape[1]):
                k = batch.keys[seq][seen, head // group].double()
                v = batch.values[seq][seen, head // group].double()
                scores = k @ batch.q[first + r, head].double() * scale
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[first + r, head] = (torch.softmax(scores, dim=0) @ v).float()
        first += rows
    return out
