"""Which weights of a checkpoint go where in one buffer of packed matrices, and putting them there.

The buffer is what the kernels read (`kernels.packing`), so it can be kept in a file and mapped by every worker of
the host. Offsets are multiples of 64.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.packing import (
    OUTS,
    Format,
    interleave,
    pack_f32,
    pack_q4,
    pack_q8,
    packed_bytes,
    quantise_channels,
    quantise_q8,
)
from services.engine.checkpoint import Checkpoint, check_shape
from services.engine.model_spec import WeightDtype, tensor_shapes

ALIGNMENT = 64
Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Entry:
    """One packed matrix, made of one or more tensors of the checkpoint; or a float32 vector (`fmt` is None)."""

    name: str
    sources: tuple[str, ...]
    fmt: Format | None
    source_rows: tuple[int, ...]  # of each source; of a vector, its parts' lengths
    num_inputs: int
    in_turns: bool = False  # the sources' blocks alternate; otherwise they follow each other
    offset: int = 0

    @property
    def num_outputs(self) -> int:
        if self.in_turns:
            return len(self.sources) * -(-self.source_rows[0] // OUTS) * OUTS
        return sum(self.source_rows)

    @property
    def num_bytes(self) -> int:
        if self.fmt is None:
            return self.num_inputs * 4
        return packed_bytes(self.fmt, self.num_outputs, self.num_inputs)


@dataclass(frozen=True, slots=True)
class PackPlan:
    entries: tuple[Entry, ...]
    num_bytes: int
    dtype: WeightDtype


def plan_pack(checkpoint: Checkpoint, dtype: WeightDtype) -> PackPlan:
    """Lay out all weights; reads none."""
    spec = checkpoint.spec
    planner = _Planner(checkpoint, dtype)
    planner.matrix("embed")
    if not spec.tied_embeddings:
        planner.matrix("head")
    planner.vector("norm")
    for i in range(spec.num_layers):
        planner.layer(f"layers.{i}.")
    return planner.plan()


def fill(checkpoint: Checkpoint, plan: PackPlan, buffer: Buffer) -> None:
    """Read, pack and write every entry. Mutates `buffer`, `plan.num_bytes` long.

    :raises ModelError: a tensor is missing, of an unknown type, or of another shape than the spec says.
    """
    for entry in plan.entries:
        data = _vector(checkpoint, entry) if entry.fmt is None else _matrix(checkpoint, entry, entry.fmt, plan.dtype)
        assert data.nbytes == entry.num_bytes, f"{entry.name}: {data.nbytes} bytes, planned {entry.num_bytes}"
        buffer[entry.offset : entry.offset + entry.num_bytes] = data


class _Planner:
    def __init__(self, checkpoint: Checkpoint, dtype: WeightDtype) -> None:
        self._checkpoint = checkpoint
        self._dtype: WeightDtype = dtype
        self._shapes = tensor_shapes(checkpoint.spec)
        self._entries: list[Entry] = []

    def matrix(self, name: str, entry: str = "") -> None:
        rows, columns = self._shapes[name]
        self._add(Entry(entry or name, (name,), self._format(name), (rows,), columns))

    def vector(self, entry: str, *sources: str) -> None:
        """One tensor, or several one after the other; none where the model has none."""
        names = sources or (entry,)
        if names[0] in self._shapes:
            sizes = tuple(self._shapes[name][0] for name in names)
            self._add(Entry(entry, names, None, sizes, sum(sizes)))

    def layer(self, at: str) -> None:
        self.vector(at + "attn_norm")
        self._qkv(at, tuple(at + part for part in "qkv"))
        self.vector(at + "qkv_bias", *(at + f"{part}_bias" for part in "qkv"))
        self.vector(at + "q_norm")
        self.vector(at + "k_norm")
        self.matrix(at + "o")
        self.vector(at + "attn_post_norm")
        self.vector(at + "mlp_norm")
        pair = (at + "gate", at + "up")
        formats = {self._format(name) for name in pair}
        fmt = formats.pop() if len(formats) == 1 else Format.Q8
        width, hidden = self._shapes[pair[0]]
        self._add(Entry(at + "gate_up", pair, fmt, (width, width), hidden, in_turns=True))
        self.matrix(at + "down")
        self.vector(at + "mlp_post_norm")

    def plan(self) -> PackPlan:
        last = self._entries[-1]
        return PackPlan(tuple(self._entries), _aligned(last.offset + last.num_bytes), self._dtype)

    def _qkv(self, at: str, sources: tuple[str, ...]) -> None:
        """One matrix where blocks of 16 outputs and one format allow it, else one per projection."""
        rows, columns = tuple(self._shapes[name][0] for name in sources), self._shapes[sources[0]][1]
        formats = [self._format(name) for name in sources]
        if len(set(formats)) == 1 and not any(count % OUTS for count in rows):
            self._add(Entry(at + "qkv.0", sources, formats[0], rows, columns))
            return
        for i, name in enumerate(sources):
            self.matrix(name, f"{at}qkv.{i}")

    def _format(self, source: str) -> Format:
        if self._dtype == "float32":
            return Format.F32
        return Format.Q4 if self._dtype == "auto" and self._checkpoint.bits(source) == 4 else Format.Q8

    def _add(self, entry: Entry) -> None:
        offset = 0
        if self._entries:
            last = self._entries[-1]
            offset = _aligned(last.offset + last.num_bytes)
        self._entries.append(
            Entry(
                entry.name, entry.sources, entry.fmt, entry.source_rows, entry.num_inputs, entry.in_turns, offset=offset
            )
        )


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _vector(checkpoint: Checkpoint, entry: Entry) -> Buffer:
    parts = []
    for name, size in zip(entry.sources, entry.source_rows, strict=True):
        values = checkpoint.read(name).numpy()
        check_shape(checkpoint.spec, checkpoint.label(name), values.shape, (size,))
        parts.append(values)
    return np.ascontiguousarray(np.concatenate(parts), dtype=np.float32).view(np.uint8)


def _matrix(checkpoint: Checkpoint, entry: Entry, fmt: Format, dtype: WeightDtype) -> Buffer:
    parts = []
    for name, rows in zip(entry.sources, entry.source_rows, strict=True):
        parts.append(_pack(checkpoint, name, fmt, (rows, entry.num_inputs), dtype))
    if entry.in_turns:
        return interleave(parts[0], parts[1], packed_bytes(fmt, OUTS, entry.num_inputs))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _pack(checkpoint: Checkpoint, name: str, fmt: Format, shape: tuple[int, int], dtype: WeightDtype) -> Buffer:
    if dtype == "auto" and (fmt, checkpoint.bits(name)) in ((Format.Q4, 4), (Format.Q8, 8)):
        groups = checkpoint.read_groups(name)
        check_shape(checkpoint.spec, checkpoint.label(name), groups.q.shape, shape)
        if groups.minimum is None:
            return pack_q8(groups.q.view(np.int8), groups.scale)
        return pack_q4(groups.q.view(np.uint8), groups.scale, groups.minimum)
    weights = checkpoint.read(name).numpy()
    check_shape(checkpoint.spec, checkpoint.label(name), weights.shape, shape)
    if fmt == Format.F32:
        return pack_f32(weights)
    return pack_q8(*(quantise_channels if dtype == "int8" else quantise_q8)(weights))
