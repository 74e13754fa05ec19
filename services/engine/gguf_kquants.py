"""GGUF's K-quants: super-blocks of 256 weights, whose groups have scales of 6 or 8 bits under a float16 of their own.

Layouts as in ggml's `ggml-common.h`. Q4_K: f16 d, f16 dmin, 12 bytes of 6-bit (scale, minimum) pairs, one per 32
weights, 128 bytes of two 4-bit weights: `w = d * scale * q - dmin * minimum`. Q5_K: the same with 32 bytes of fifth
bits before them. Q6_K: 128 bytes of low and 64 of high bits, 16 int8 scales, one per 16 weights, f16 d:
`w = d * scale * (q - 32)`.
"""

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
SUPER = 256


def from_q4_k(blocks: Bytes) -> Float32:
    scale, minimum = q4_k_scales(blocks)
    return _affine(q4_k_numbers(blocks), scale, minimum)


def from_q5_k(blocks: Bytes) -> Float32:
    scale, minimum = q4_k_scales(blocks)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [num_blocks, 8, 32]
    return _affine((_nibbles(blocks[:, 48:]) | (high << 4)).astype(np.uint8), scale, minimum)


def from_q6_k(blocks: Bytes) -> Float32:
    count = len(blocks)
    low, high = blocks[:, :128].reshape(count, 2, 1, 64), blocks[:, 128:192].reshape(count, 2, 1, 32)
    low = (low >> np.array([0, 4], np.uint8)[:, None]) & 15  # [num_blocks, half, 2, 64]
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3  # [num_blocks, half, 4, 32]
    q = (low.reshape(count, 16, 16) | (high.reshape(count, 16, 16) << 4)).astype(np.float32) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * q).reshape(count, SUPER)


def q4_k_numbers(blocks: Bytes) -> npt.NDArray[np.uint8]:
    """The 4-bit weights, [num_blocks, 8, 32]."""
    return _nibbles(blocks[:, 16:])


def q4_k_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """Scale and minimum (to be subtracted) of each 32 weights, [num_blocks, 8] both. The first four pairs lie in the
    low 6 bits of bytes 0-7; the others' low 4 bits in bytes 8-11, and their high 2 bits on top of bytes 0-7."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return _half(blocks, 0) * scale.astype(np.float32), _half(blocks, 2) * minimum.astype(np.float32)


def _affine(q: npt.NDArray[np.uint8], scale: Float32, minimum: Float32) -> Float32:
    """:param q: [num_blocks, 8, 32]."""
    return (scale[:, :, None] * q.astype(np.float32) - minimum[:, :, None]).reshape(len(q), SUPER)


def _nibbles(packed: Bytes) -> npt.NDArray[np.uint8]:
    """[num_blocks, 128] bytes to [num_blocks, 8, 32]: of each 32 bytes the low halves, then the high ones."""
    parts = packed.reshape(len(packed), 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None]
    return (parts & 15).reshape(len(packed), 8, 32).astype(np.uint8)


def _half(blocks: Bytes, first: int) -> Float32:
    """A float16 field of each block, [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(np.float32)
