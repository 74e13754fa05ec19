"""GGUF's tensor types to float32. A quantised row is groups of 32 weights, each with its scale.

Layouts as in ggml's `ggml-common.h`: Q8_0 = f16 scale, 32 int8; Q4_0 = f16 scale, 16 bytes of two 4-bit
weights, the low halves first, minus 8; Q4_1 = f16 scale, f16 minimum, 16 bytes likewise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]  # [num_groups, group_bytes]


@dataclass(frozen=True, slots=True)
class GgufType:
    name: str
    group: int  # weights
    group_bytes: int
    widen: Callable[[Bytes], Float32]  # -> [num_groups, group]


def dequantise(data: memoryview | bytes, type_id: int, shape: tuple[int, ...]) -> Float32:
    """The weights of a tensor stored as `type_id` (one of `TYPES`), float32 of `shape`."""
    kind = TYPES[type_id]
    groups = np.frombuffer(data, dtype=np.uint8).reshape(-1, kind.group_bytes)
    return kind.widen(groups).reshape(shape)


@dataclass(frozen=True, slots=True)
class Groups:
    """A quantised matrix as stored: w = scale * q (+ minimum), per row and group of 32."""

    q: npt.NDArray[np.uint8] | npt.NDArray[np.int8]  # [rows, columns]; unsigned exactly if there are minima
    scale: npt.NDArray[np.float16]  # [rows, groups]
    minimum: npt.NDArray[np.float16] | None

    def reorder(self, rows: npt.NDArray[np.int64]) -> "Groups":
        """The same matrix with its rows in another order."""
        return Groups(self.q[rows], self.scale[rows], None if self.minimum is None else self.minimum[rows])


def bits_of(type_id: int) -> int:
    """Bits per weight of a type that `split` can take apart; 0 for the others."""
    return {2: 4, 3: 4, 8: 8}.get(type_id, 0)


def split(data: memoryview | bytes, type_id: int, shape: tuple[int, ...]) -> Groups:
    """A Q4_0, Q4_1 or Q8_0 matrix without a loss: Q4_0's -8 becomes a minimum of -8 scales, which is exact unless it
    is too large for float16."""
    rows = shape[0]
    groups = np.frombuffer(data, dtype=np.uint8).reshape(-1, TYPES[type_id].group_bytes)
    scale = np.ascontiguousarray(groups[:, :2]).view(np.float16).reshape(rows, -1)
    if type_id == 8:
        return Groups(groups[:, 2:].view(np.int8).reshape(shape), scale, None)
    first = 4 if type_id == 3 else 2
    q = np.concatenate([groups[:, first:] & 15, groups[:, first:] >> 4], axis=1).reshape(shape)
    if type_id == 3:
        return Groups(q, scale, np.ascontiguousarray(groups[:, 2:4]).view(np.float16).reshape(rows, -1))
    return Groups(q, scale, scale * np.float16(-8))


def type_name(type_id: int) -> str:
    """ggml's name of a type, for messages; also of types that this build cannot read."""
    if type_id in TYPES:
        return TYPES[type_id].name
    from gguf import GGMLQuantizationType  # slow to import, and wanted only here

    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"number {type_id}"


def _half(groups: Bytes, first: int) -> Float32:
    """A float16 field of each group, [num_groups, 1]."""
    return np.ascontiguousarray(groups[:, first : first + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Float32:
    """[num_groups, 16] bytes to [num_groups, 32] numbers 0..15: low halves, then high halves."""
    out = np.empty((len(packed), 32), dtype=np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _from_f32(groups: Bytes) -> Float32:
    return groups.view(np.float32).copy()


def _from_f16(groups: Bytes) -> Float32:
    return groups.view(np.float16).astype(np.float32)


def _from_bf16(groups: Bytes) -> Float32:
    return (groups.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _from_q8_0(groups: Bytes) -> Float32:
    out = groups[:, 2:].view(np.int8).astype(np.float32)
    out *= _half(groups, 0)
    return out


def _from_q4_0(groups: Bytes) -> Float32:
    out = _nibbles(groups[:, 2:])
    out -= 8
    out *= _half(groups, 0)
    return out


def _from_q4_1(groups: Bytes) -> Float32:
    out = _nibbles(groups[:, 4:])
    out *= _half(groups, 0)
    out += _half(groups, 2)
    return out


TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4, _from_f32),
    1: GgufType("F16", 1, 2, _from_f16),
    2: GgufType("Q4_0", 32, 18, _from_q4_0),
    3: GgufType("Q4_1", 32, 20, _from_q4_1),
    8: GgufType("Q8_0", 32, 34, _from_q8_0),
    30: GgufType("BF16", 1, 2, _from_bf16),
}
