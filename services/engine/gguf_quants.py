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
