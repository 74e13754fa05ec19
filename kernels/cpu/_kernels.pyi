from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TILE: int

def linear_body() -> str: ...
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
    window: int,
    softcap: float,
    num_threads: int,
    simd: bool,
    /,
) -> None: ...

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

class Matrix:
    def __init__(self, fmt: int, num_outputs: int, num_inputs: int, data: npt.NDArray[np.uint8], /) -> None: ...

def linear(w: Matrix, x: _Floats, out: _Floats, finish: int, num_threads: int, simd: bool, /) -> None: ...
def read_rows(w: Matrix, ids: _Ints, out: _Floats, num_threads: int, /) -> None: ...
def rms_norm(
    x: _Floats, weight: _Floats, eps: float, out: _Floats, passes: int, num_threads: int, simd: bool, /
) -> None: ...
def gate_mul(
    gate: _Floats, up: _Floats, gelu: bool, out: _Floats, passes: int, num_threads: int, simd: bool, /
) -> None: ...
def rope(x: _Floats, cos: _Floats, sin: _Floats, passes: int, num_threads: int, simd: bool, /) -> None: ...
def prepare_rows(
    fmt: int,
    x: _Floats,
    norm: _Floats | None,
    eps: float,
    out: npt.NDArray[np.uint8],
    passes: int,
    num_threads: int,
    simd: bool,
    /,
) -> None: ...

class DecoderShape:
    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab: int,
        rms_eps: float,
        embed_scale: float,
        attention_scale: float,
        attention_softcap: float,
        logit_softcap: float,
        gelu: bool,
        /,
    ) -> None: ...

class Decoder:
    def __init__(
        self,
        shape: DecoderShape,
        inverse_frequencies: _Floats,
        rope_scales: _Floats,
        embed: Matrix,
        head: Matrix,
        norm: _Floats,
        /,
    ) -> None: ...
    def add_layer(
        self,
        attn_norm: _Floats,
        qkv: Sequence[tuple[int, Matrix]],
        o: Matrix,
        mlp_norm: _Floats,
        gate_up: Matrix,
        down: Matrix,
        qkv_bias: _Floats | None,
        q_norm: _Floats | None,
        k_norm: _Floats | None,
        attn_post_norm: _Floats | None,
        mlp_post_norm: _Floats | None,
        window: int,
        rope: int,
        /,
    ) -> None: ...
    def forward(
        self,
        cache: LayerCache,
        layer_stride: int,
        token_ids: _Ints,
        positions: _Ints,
        slot_mapping: _Ints,
        block_tables: _Ints,
        query_start: _Ints,
        context_lens: _Ints,
        logit_rows: _Ints,
        logits: _Floats,
        num_threads: int,
        simd: bool,
        /,
    ) -> None: ...

def peak_ops(kind: int, iterations: int, num_threads: int, /) -> int: ...
def peak_read(data: npt.NDArray[np.uint8], piece_bytes: int, passes: int, num_threads: int, /) -> int: ...
def draw_tokens(
    logits: _Floats,
    temperature: _Floats,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    least: _Floats,
    u: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.int64],
    num_threads: int,
    simd: bool,
    /,
) -> None: ...
def mask_logits(logits: _Floats, allowed: npt.NDArray[np.uint32], num_threads: int, /) -> None: ...
def adjust_logits(
    logits: _Floats,
    rows: npt.NDArray[np.int64],
    bias_start: npt.NDArray[np.int64],
    bias_ids: _Ints,
    bias: _Floats,
    token_start: npt.NDArray[np.int64],
    tokens: _Ints,
    num_prompt: npt.NDArray[np.int64],
    repetition: _Floats,
    frequency: _Floats,
    presence: _Floats,
    num_threads: int,
    /,
) -> None: ...
def tell_logprobs(
    logits: _Floats,
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    num_top: npt.NDArray[np.int64],
    logprobs: _Floats,
    ranks: npt.NDArray[np.int64],
    top_ids: _Ints,
    top_logprobs: _Floats,
    num_threads: int,
    simd: bool,
    /,
) -> None: ...
