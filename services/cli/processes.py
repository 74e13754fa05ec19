"""Real processes, Linux only. A child dies with its supervisor, even if that is killed with SIGKILL; it is in a
session of its own, so that a Ctrl-C of the terminal reaches the supervisor alone, which then drains in order."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from services.cli.supervisor import Running, ServiceSpec
from shared.clock import Clock

PR_SET_PDEATHSIG = 1
MAX_LINE_BYTES = 64 << 10
LAST_WORDS_S = 0.5  # how long a dead child's output is still read: a grandchild may hold the pipe open
_libc = ctypes.CDLL(None, use_errno=True)

OnLine = Callable[[str, bytes], None]


class ProcessSpawner:
    """Starts services; their output goes, line by line, to `on_line(service name, line)`.

    `tasks` must outlive all children: it reads their output.
    """

    def __init__(self, tasks: TaskGroup, clock: Clock, cwd: Path, environ: Mapping[str, str], on_line: OnLine) -> None:
        self._tasks, self._clock, self._cwd, self._environ, self._on_line = tasks, clock, cwd, environ, on_line

    async def spawn(self, spec: ServiceSpec) -> Running:
        """Popen and no await before the child runs: nothing can be cancelled half-way."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        try:
            popen = subprocess.Popen(  # noqa: ASYNC220 - a fork takes a millisecond or two
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=subprocess.STDOUT,
                cwd=self._cwd,
                env={**self._environ, **spec.env},
                start_new_session=True,
                preexec_fn=_child_setup(os.getpid(), spec.cores),  # safe: the supervisor has one thread
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        child = Child(popen, self._clock)
        self._tasks.start_soon(_read_lines, read_end, child, lambda line: self._on_line(spec.name, line))
        return child


class Child:
    """A started process. `wait` uses a pidfd where the kernel has them, else it polls."""

    def __init__(self, popen: "subprocess.Popen[bytes]", clock: Clock) -> None:
        self._popen, self._clock = popen, clock
        self.gone = anyio.Event()

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def wait(self) -> int:
        try:
            pidfd = os.pidfd_open(self.pid) if self._popen.poll() is None else None
        except OSError:
            pidfd = None
        try:
            while self._popen.poll() is None:
                if pidfd is None:
                    await self._clock.sleep(0.05)
                else:
                    await anyio.wait_readable(pidfd)
        finally:
            if pidfd is not None:
                os.close(pidfd)
        self.gone.set()
        return self._popen.returncode

    def send(self, sig: signal.Signals) -> None:
        self._popen.send_signal(sig)  # Popen checks that the child has not been reaped


def _child_setup(parent: int, cores: tuple[int, ...]) -> Callable[[], None]:
    def setup() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    return setup


async def _read_lines(fd: int, child: Child, on_line: Callable[[bytes], None]) -> None:
    """Hand on each line until the end of the pipe, or a little after the child's death. Closes `fd`."""
    buffer = LineBuffer(on_line)
    try:
        async with anyio.create_task_group() as tasks:

            async def pump() -> None:
                while data := await _read(fd):
                    buffer.feed(data)
                tasks.cancel_scope.cancel()

            tasks.start_soon(pump)
            await child.gone.wait()
            with anyio.move_on_after(LAST_WORDS_S):
                await anyio.Event().wait()
            tasks.cancel_scope.cancel()
    finally:
        buffer.flush()
        os.close(fd)


async def _read(fd: int) -> bytes:
    """The next bytes of a non-blocking pipe; b"" at its end."""
    while True:
        await anyio.wait_readable(fd)
        try:
            return os.read(fd, 1 << 16)
        except BlockingIOError:
            continue


class LineBuffer:
    """Cuts a byte stream into lines; a line beyond `MAX_LINE_BYTES` is handed on in pieces."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._rest:
            self._on_line(self._rest)
        self._rest = b""
