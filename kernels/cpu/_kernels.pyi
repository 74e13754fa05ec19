TILE: int

def simd_name() -> str: ...

class LayerCache:
    def __init__(
        self,
        base: int,
        dtype: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        block_stride: int,
        head_stride: int,
        kv_stride: int,
        token_stride: int,
        /,
    ) -> None: ...

def store_kv(
    cache: LayerCache,
    k: int,
    v: int,
    k_stride: int,
    v_stride: int,
    slot_mapping: int,
    num_tokens: int,
    simd: bool,
    /,
) -> None: ...
def paged_attention(
    cache: LayerCache,
    out: int,
    q: int,
    out_stride: int,
    q_stride: int,
    num_heads: int,
    block_tables: int,
    num_seqs: int,
    max_blocks: int,
    query_start: int,
    context_lens: int,
    scale: float,
    num_threads: int,
    simd: bool,
    /,
) -> None: ...
