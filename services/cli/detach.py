"""`--detach`: the supervisor goes on in a process of its own; the command returns when it is ready or has failed."""

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from services.cli.errors import CommandError
from shared.errors import BatonError

Tell = Callable[[str], None]


def detach(log: Path, body: Callable[[Tell], None]) -> str:
    """Run `body(tell)` in a forked process; returns what it tells, once it does.

    The child reports over a pipe: "+message" when it is ready, "-message" when it has failed.

    :raises CommandError: the child failed before it told anything.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _child(log, write_end, body)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        report = _read_all(pipe.fileno(), child).decode("utf-8", "replace")
    if report.startswith("+"):
        return report[1:]
    message, _, details = report[1:].partition("\n")
    raise CommandError(message or f"the supervisor died; its log: {log}", details=details)


def _read_all(fd: int, child: int) -> bytes:
    """Until the child closes the pipe. Ctrl-C meanwhile is passed on, and its outcome awaited."""
    out = b""
    while True:
        try:
            select.select([fd], [], [])
            data = os.read(fd, 1 << 16)
        except KeyboardInterrupt:
            os.kill(child, signal.SIGTERM)
            continue
        if not data:
            return out
        out += data


class _Report:
    """The child's end of the pipe: one report, then it is closed."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def send(self, kind: bytes, message: str) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):  # the command was killed meanwhile; the stack goes on
            os.write(fd, kind + message.encode())
        os.close(fd)


def _child(log: Path, write_end: int, body: Callable[[Tell], None]) -> None:
    """The supervisor's side; never returns."""
    code = 1
    report = _Report(write_end)
    try:
        os.setsid()
        _redirect(log)
        body(lambda message: report.send(b"+", message))
        report.send(b"-", "stopped before it was ready")
        code = 0
    except BatonError as exc:
        text = f"{exc}\n{getattr(exc, 'details', '')}".rstrip()
        print(f"baton: {text}", file=sys.stderr)
        report.send(b"-", text)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # the parent's exit handlers are not ours


def _redirect(log: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
