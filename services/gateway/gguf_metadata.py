"""The key-value part of a GGUF file, and nothing of its tensors.

The `gguf` package builds a numpy view per string, which takes seconds for a vocabulary; this reads the
same in tenths. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from shared.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata: scalars, strings, and lists of them.

    :raises ModelError: unreadable, truncated, not GGUF, or of an unknown version.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata()
    except (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError, RecursionError):
        raise ModelError(f"model {path}: the GGUF header is damaged or cut off") from None
    except ValueError as exc:
        raise ModelError(f"model {path}: {exc}") from None
    except OSError as exc:
        raise ModelError(f"model {path}: {exc.strerror or exc}") from None


class _Reader:
    """A position in the file. Owns nothing."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        magic, version, _num_tensors, num_pairs = self._take("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("not a GGUF file")
        if version not in (2, 3):  # a big-endian file shows as a huge version
            raise ValueError(f"GGUF version {version} is not supported")
        out: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            out[key] = self._value(*self._take("I"))
        return out

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
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._take("IQ")
            if count > len(self._data):
                raise IndexError
            if inner in _SCALARS:
                return list(self._take(f"{count}{_SCALARS[inner]}"))
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown GGUF value type {kind}")
        return self._take(_SCALARS[kind])[0]
