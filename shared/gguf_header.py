"""The header of a GGUF file: its metadata, and where each tensor's bytes are. Used by gateway and engine alike.

The `gguf` package builds a numpy view per string, which takes seconds for a vocabulary; this reads the
same in tenths. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_DAMAGE = (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError, RecursionError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's place, as the file has it; `shape` in row-major order: the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`data_start`: bytes from the start of the file to the first tensor."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_start: int


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata: scalars, strings, and lists of them.

    :raises ModelError: unreadable, truncated, not GGUF, or of an unknown version.
    """
    data = map_file(path)
    try:
        return _parsed(path, lambda: _Reader(data, texts=True).metadata())
    finally:
        data.close()


def read_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """The header of a mapped file, without its lists of strings (vocabularies), which are skipped.

    :raises ModelError: truncated, not GGUF, or of an unknown version.
    """
    return _parsed(path, lambda: _Reader(data, texts=False).header())


def map_file(path: Path) -> mmap.mmap:
    """:raises ModelError: unreadable or empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise ModelError(f"model {path}: {exc.strerror or exc}") from None
    except ValueError:
        raise ModelError(f"model {path}: not a GGUF file, it is empty") from None


def _parsed(path: Path, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except _DAMAGE as exc:
        raise ModelError(f"model {path}: the GGUF header is damaged or cut off ({type(exc).__name__})") from None
    except ValueError as exc:
        raise ModelError(f"model {path}: {exc}") from None


class _Reader:
    """A position in the file. Owns nothing. Raises one of `_DAMAGE`, or ValueError with a reason."""

    def __init__(self, data: mmap.mmap, *, texts: bool) -> None:
        """:param texts: read lists of strings, else skip them."""
        self._data = data
        self._at = 0
        self._texts = texts
        self._num_tensors = 0

    def metadata(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        _magic, version, self._num_tensors, num_pairs = self._take("4sIQQ")
        if version not in (2, 3):  # a big-endian file shows as a huge version
            raise ValueError(f"GGUF version {version} is not known")
        out: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            value = self._value(*self._take("I"))
            if value is not None:
                out[key] = value
        return out

    def header(self) -> GgufHeader:
        metadata = self.metadata()
        infos = [self._tensor() for _ in range(self._num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in infos)
        return GgufHeader(metadata, tensors, start)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._take("I")
        shape = self._take(f"{num_dims}Q")[::-1]
        return name, shape, *self._take("IQ")

    def _take(self, fields: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + fields, self._data, self._at)
        self._at += struct.calcsize("<" + fields)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) != length:
            raise IndexError
        self._at += length
        return raw.decode()

    def _value(self, kind: int) -> Any:
        """None: a list of strings that was skipped."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._list()
        if kind not in _SCALARS:
            raise ValueError(f"unknown GGUF value type {kind}")
        return self._take(_SCALARS[kind])[0]

    def _list(self) -> list[Any] | None:
        inner, count = self._take("IQ")
        if count > len(self._data):
            raise IndexError
        if inner in _SCALARS:
            return list(self._take(f"{count}{_SCALARS[inner]}"))
        if inner == _STRING and not self._texts:
            unpack, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
            self._at = at
            return None
        return [self._value(inner) for _ in range(count)]
