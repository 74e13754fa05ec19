"""A service's output: all of it to its file, what a person should see to the terminal, the last lines kept
for a death notice."""

import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

MAX_FILE_BYTES = 32 << 20
KEPT_LINES = 15
_QUIET = {"debug", "info", "notset"}
_QUIET_TEXT = re.compile(r"\b(debug|info)\b", re.IGNORECASE)


class LogFile:
    """Appends lines; at `max_bytes` the file becomes `<name>.1` and a new one begins."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file: BinaryIO = path.open("ab")
        self._size = self._file.tell()

    def write(self, line: bytes) -> None:
        if self._size > self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_suffix(self._path.suffix + ".1"))
            self._file, self._size = self._path.open("ab"), 0
        self._size += self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class LogSink:
    """Where all services' lines go. `show(name, text)` prints a warning or worse; quiet services never show."""

    def __init__(self, folder: Path, show: Callable[[str, str], None], quiet: frozenset[str] = frozenset()) -> None:
        self._folder, self._show, self._quiet = folder, show, quiet
        self._files: dict[str, LogFile] = {}
        self._last: dict[str, deque[str]] = {}

    def line(self, name: str, raw: bytes) -> None:
        if name not in self._files:
            self._files[name] = LogFile(self._folder / f"{name}.log")
            self._last[name] = deque(maxlen=KEPT_LINES)
        self._files[name].write(raw)
        level, text = parse_line(raw.decode("utf-8", "replace"))
        self._last[name].append(text)
        if level not in _QUIET and name not in self._quiet and text.strip():
            self._show(name, text)

    def last_lines(self, name: str) -> str:
        return "\n".join(self._last.get(name, ()))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def parse_line(line: str) -> tuple[str, str]:
    """(level, text for a person) of a log line. What is not one of our JSON lines is a warning (a traceback, a
    library's complaint), unless it calls itself debug or info near its start."""
    if line.startswith("{"):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and "event" in record:
            return str(record.get("level", "info")).lower(), _text(record)
    return ("info" if _QUIET_TEXT.search(line[:60]) else "warning"), line


def _text(record: dict[str, object]) -> str:
    """A JSON log record as one readable line, a traceback below it."""
    hidden = {"event", "level", "timestamp", "exception", "service", "incarnation"}
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in hidden)
    level = str(record.get("level", "info")).lower()
    head = f"{level}: {record['event']}" + (f" ({fields})" if fields else "")
    trace = record.get("exception")
    return f"{head}\n{trace}" if isinstance(trace, str) else head
