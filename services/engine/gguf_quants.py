"""GGUF's tensor types to float32. A quantised row is groups of 32 weights, each with its scale.

Layouts as in ggml's `ggml-common.h`: Q8_0 = f16 scale, 32 int8; Q4_0 = f16 scale, 16 bytes of two 4-bit
weights, the low halves first, minus 8; Q4_1 = f16 scale, f16 minimum, 16 bytes likewise; Q5_0 and Q5_1 the same
with the 32 fifth bits before the bytes, Q5_0 minus 16. K-quants: `services.engine.gguf_kquants`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.engine import gguf_kquants as kquants

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
    return {2: 4, 3: 4, 6: 8, 8: 8, 12: 4}.get(type_id, 0)


def split(data: memoryview | bytes, type_id: int, shape: tuple[int, ...]) -> Groups:
    """A matrix's 4- or 8-bit weights. Q4_1, Q5_0 and Q8_0 without a loss. Q4_0's -8 becomes a minimum of -8 scales,
    which is exact unless it is too large for float16. Q4_K's scales and minima are rounded to float16."""
    rows = shape[0]
    groups = np.frombuffer(data, dtype=np.uint8).reshape(-1, TYPES[type_id].group_bytes)
    if type_id == 12:
        scale, minimum = (part.astype(np.float16).reshape(rows, -1) for part in kquants.q4_k_scales(groups))
        return Groups(kquants.q4_k_numbers(groups).reshape(shape), scale, -minimum)
    scale = np.ascontiguousarray(groups[:, :2]).view(np.float16).reshape(rows, -1)
    if type_id == 8:
        return Groups(groups[:, 2:].view(np.int8).reshape(shape), scale, None)
    if type_id == 6:
        return Groups(_fives(groups, 2).astype(np.int8).reshape(shape) - np.int8(16), scale, None)
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


def _fives(groups: Bytes, first: int) -> npt.NDArray[np.uint8]:
    """Numbers 0..31, [num_groups, 32], whose fifth bits begin at byte `first`."""
    high = np.unpackbits(groups[:, first : first + 4], axis=1, bitorder="little")
    low = groups[:, first + 4 :]
    return (np.concatenate([low & 15, low >> 4], axis=1) | (high << 4)).astype(np.uint8)


def _from_q5_0(groups: Bytes) -> Float32:
    out = _fives(groups, 2).astype(np.float32)
    out -= 16
    out *= _half(groups, 0)
    return out


def _from_q5_1(groups: Bytes) -> Float32:
    out = _fives(groups, 4).astype(np.float32)
    out *= _half(groups, 0)
    out += _half(groups, 2)
    return out


TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4, _from_f32),
    1: GgufType("F16", 1, 2, _from_f16),
    2: GgufType("Q4_0", 32, 18, _from_q4_0),
    3: GgufType("Q4_1", 32, 20, _from_q4_1),
    6: GgufType("Q5_0", 32, 22, _from_q5_0),
    7: GgufType("Q5_1", 32, 24, _from_q5_1),
    8: GgufType("Q8_0", 32, 34, _from_q8_0),
    12: GgufType("Q4_K", 256, 144, kquants.from_q4_k),
    13: GgufType("Q5_K", 256, 176, kquants.from_q5_k),
    14: GgufType("Q6_K", 256, 210, kquants.from_q6_k),
    30: GgufType("BF16", 1, 2, _from_bf16),
}
