"""Weights in the form that the CPU's linear layers read; kernels/cpu/linear.h describes the bytes.

Plain numpy, run once per model: the result is kept in a file. Matrices are `[num_outputs, num_inputs]`; outputs are
padded to blocks of 16 and inputs to groups of 32, with zeros.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

OUTS, GROUP = 16, 32

Packed = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]


class Format(IntEnum):
    """How a packed matrix keeps its weights. `Q8`: w = scale * q, q in -127..127. `Q4`: w = scale * q + minimum,
    q in 0..15. One scale (and minimum) per output and group of 32 inputs, float16."""

    F32 = 0
    Q8 = 1
    Q4 = 2


def packed_bytes(fmt: Format, num_outputs: int, num_inputs: int) -> int:
    """Size of a packed matrix."""
    blocks, groups = -(-num_outputs // OUTS), -(-num_inputs // GROUP)
    if fmt == Format.F32:
        return blocks * num_inputs * OUTS * 4
    return blocks * groups * (OUTS * GROUP + 2 * OUTS if fmt == Format.Q8 else OUTS * GROUP // 2 + 4 * OUTS)


def pack_f32(weights: npt.NDArray[np.float32]) -> Packed:
    """:param weights: `[num_outputs, num_inputs]`."""
    padded = _pad(weights, OUTS, 1)
    blocks = padded.reshape(-1, OUTS, padded.shape[1]).transpose(0, 2, 1)  # [block, input, output]
    return np.ascontiguousarray(blocks).reshape(-1).view(np.uint8)


def pack_q8(q: npt.NDArray[np.int8], scale: Halves) -> Packed:
    """:param q: `[num_outputs, num_inputs]`. :param scale: `[num_outputs, num_groups]`."""
    tiles = _tiles(q, 16, 2)  # [block, half, output, group, step, input]
    tiles = tiles.transpose(0, 3, 1, 4, 2, 5)  # [block, group, half, step, output, input]
    blocks, groups = tiles.shape[:2]
    values = np.ascontiguousarray(tiles).reshape(blocks, groups, -1).view(np.uint8)
    return np.concatenate([values, _per_group(scale)], axis=-1).reshape(-1)


def pack_q4(q: npt.NDArray[np.uint8], scale: Halves, minimum: Halves) -> Packed:
    """:param q: `[num_outputs, num_inputs]`, 0..15. :param scale, minimum: `[num_outputs, num_groups]`."""
    tiles = _tiles(q, 8, 4).transpose(1, 0, 3, 4, 2, 5)  # [half, block, group, step, output, input]
    both = tiles[0] | (tiles[1] << 4)
    blocks, groups = both.shape[:2]
    parts = [both.reshape(blocks, groups, -1), _per_group(scale), _per_group(minimum)]
    return np.concatenate(parts, axis=-1).reshape(-1)


def quantise_q8(weights: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], Halves]:
    """8-bit weights, each group of 32 with the scale of its largest weight: (q, scale) for `pack_q8`."""
    padded = _pad(weights, 1, GROUP)
    groups = padded.reshape(len(padded), -1, GROUP)
    scale = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    q = np.rint(np.divide(groups, divisor)).clip(-127, 127).astype(np.int8)
    return q.reshape(padded.shape)[:, : weights.shape[1]], scale


def quantise_channels(weights: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], Halves]:
    """8-bit weights, each output with one scale, that of its largest weight, for all its groups."""
    groups = -(-weights.shape[1] // GROUP)
    scale = (np.abs(weights).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)
    q = np.rint(weights / divisor).clip(-127, 127).astype(np.int8)
    return q, np.repeat(scale, groups, axis=1)


def interleave(first: Packed, second: Packed, block_bytes: int) -> Packed:
    """Two packed matrices of one shape, block by block in turns: gate and up of one product."""
    pair = np.stack([first.reshape(-1, block_bytes), second.reshape(-1, block_bytes)], axis=1)
    return pair.reshape(-1)


def _tiles(q: npt.NDArray[Any], steps: int, inputs: int) -> npt.NDArray[Any]:
    """[num_outputs, num_inputs] to [block, half 2, output 8, group, step, input]."""
    padded = _pad(q, OUTS, GROUP)
    return padded.reshape(len(padded) // OUTS, 2, 8, padded.shape[1] // GROUP, steps, inputs)


def _per_group(values: Halves) -> Packed:
    """[num_outputs, num_groups] to bytes [block, group, 2 * 16]."""
    padded = _pad(values, OUTS, 1)
    blocks = padded.reshape(-1, OUTS, padded.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(blocks).view(np.uint8)


def _pad(x: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[Any]:
    """Zeros behind, to whole multiples."""
    if not len(x) % rows and not x.shape[1] % columns:
        return x
    return np.pad(x, ((0, -len(x) % rows), (0, -x.shape[1] % columns)))
