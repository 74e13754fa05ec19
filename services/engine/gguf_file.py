"""Reads GGUF files: metadata, and where each tensor's bytes are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.gguf_quants import TYPES, type_name
from shared.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place. `shape` in row-major order: the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        """:raises ModelError: this build does not know the tensor's type, or a row is no whole number of groups."""
        if self.type_id not in TYPES:
            raise ModelError(f"tensor {self.name} has type {type_name(self.type_id)}, which this build cannot read")
        kind, count = TYPES[self.type_id], 1
        for size in self.shape:
            count *= size
        if self.shape[-1] % kind.group:
            raise ModelError(f"tensor {self.name}: rows of {self.shape[-1]} are no multiple of {kind.group}")
        return count // kind.group * kind.group_bytes


class GgufFile:
    """An open file, mapped. `metadata` has scalars and strings; arrays are left out (the engine needs none)."""

    def __init__(self, path: Path) -> None:
        """:raises ModelError: unreadable, not GGUF, cut short, or a version this build does not know."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise ModelError(f"model {path}: {exc}") from None
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.data_start = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, IndexError) as exc:
            raise ModelError(f"model {path}: damaged GGUF header: {exc}") from None

    def read(self, tensor: GgufTensor) -> memoryview:
        """The tensor's bytes as stored."""
        return memoryview(self.data)[tensor.offset : tensor.offset + tensor.num_bytes]

    def _parse(self) -> None:
        cursor = _Cursor(self.data)
        magic = cursor.take(4)
        if magic != MAGIC:
            raise ModelError(f"model {self.path}: not a GGUF file")
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"model {self.path}: GGUF version {version} is not known")
        num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(num_fields):
            key = cursor.string()
            value = cursor.value(cursor.scalar("<I"))
            if value is not None:
                self.metadata[key] = value
        infos = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        self.data_start = -(-cursor.at // alignment) * alignment
        for name, shape, type_id, offset in infos:
            tensor = GgufTensor(name, shape, type_id, self.data_start + offset)
            if tensor.offset + tensor.num_bytes > len(self.data):
                raise ModelError(f"model {self.path}: tensor {name} reaches behind the end of the file")
            self.tensors[name] = tensor

    def _tensor_info(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dims = cursor.scalar("<I")
        shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
        return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")


class _Cursor:
    """Walks the header. Raises struct.error or IndexError where the file ends too soon."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise IndexError("unexpected end of file")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode()

    def value(self, kind: int) -> Any:
        """A scalar or string; None for an array, which is skipped."""
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise IndexError(f"metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _skip_array(self) -> None:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in _SCALARS:
            self.at += count * struct.calcsize(_SCALARS[kind])
        elif kind == _STRING:
            unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
            self.at = at
        else:
            for _ in range(count):
                self.value(kind)
