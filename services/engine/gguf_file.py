"""Reads GGUF files: the header, and each tensor's bytes."""

from dataclasses import dataclass
from pathlib import Path

from services.engine.gguf_quants import TYPES, type_name
from shared.errors import ModelError
from shared.gguf_header import TensorInfo, map_file, read_header


@dataclass(frozen=True, slots=True)
class GgufTensor(TensorInfo):
    """A tensor's place, and how long it is."""

    @property
    def num_bytes(self) -> int:
        """:raises ModelError: this build does not know the tensor's type, or a row is no whole number of groups."""
        if self.type_id not in TYPES:
            raise ModelError(f"tensor {self.name} has type {type_name(self.type_id)}, which this build cannot read")
        kind, count = TYPES[self.type_id], 1
        for size in self.shape:
            count *= size
        if not self.shape or self.shape[-1] % kind.group:
            raise ModelError(f"tensor {self.name}: a row of shape {self.shape} is no multiple of {kind.group}")
        return count // kind.group * kind.group_bytes


class GgufFile:
    """An open file, mapped. `metadata` has scalars, strings and lists of numbers; lists of strings are left out."""

    def __init__(self, path: Path) -> None:
        """:raises ModelError: unreadable, not GGUF, cut short, or a version this build does not know."""
        self.path = path
        self.data = map_file(path)
        header = read_header(path, self.data)
        self.metadata, self.data_start = header.metadata, header.data_start
        self.tensors: dict[str, GgufTensor] = {}
        for info in header.tensors:
            tensor = GgufTensor(info.name, info.shape, info.type_id, info.offset)
            if tensor.offset + tensor.num_bytes > len(self.data):
                raise ModelError(f"model {path}: tensor {tensor.name} reaches behind the end of the file")
            self.tensors[tensor.name] = tensor

    def read(self, tensor: GgufTensor) -> memoryview:
        """The tensor's bytes as stored."""
        return memoryview(self.data)[tensor.offset : tensor.offset + tensor.num_bytes]
