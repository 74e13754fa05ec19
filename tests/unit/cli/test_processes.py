"""Real processes: output, exit codes, cores, and that none outlives its supervisor."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from services.cli.processes import MAX_LINE_BYTES, LineBuffer, ProcessSpawner
from services.cli.procinfo import ProcessId
from services.cli.supervisor import ServiceSpec
from shared.clock import SystemClock

pytestmark = pytest.mark.anyio


def python(code: str, **more: object) -> ServiceSpec:
    return ServiceSpec(name="p", argv=(sys.executable, "-c", code), ready="http://none", **more)  # type: ignore[arg-type]


async def run(spec: ServiceSpec, tmp_path: Path, env: dict[str, str] | None = None) -> tuple[int, list[bytes]]:
    lines: list[bytes] = []
    code = 0
    async with anyio.create_task_group() as tasks:
        spawner = ProcessSpawner(tasks, SystemClock(), tmp_path, env or {}, lambda _, line: lines.append(line))
        child = await spawner.spawn(spec)
        code = await child.wait()
    return code, lines


async def test_output_arrives_line_by_line_to_the_last_word(tmp_path: Path):
    """stdout and stderr, a last line without its end included; the exit code is the child's."""
    code, lines = await run(python("import sys; print('a', flush=True); sys.stderr.write('b'); sys.exit(7)"), tmp_path)
    assert (code, lines) == (7, [b"a", b"b"])


async def test_a_signal_is_a_negative_code(tmp_path: Path):
    """As subprocess has it."""
    code, _ = await run(python("import os; os.kill(os.getpid(), 9)"), tmp_path)
    assert code == -9


async def test_a_child_has_its_cores_and_only_its_environment(tmp_path: Path):
    """Affinity holds from the first instruction; variables are those given."""
    core = min(os.sched_getaffinity(0))
    spec = python("import os; print(os.sched_getaffinity(0), os.environ['A'], 'PATH' in os.environ)", cores=(core,))
    _, lines = await run(spec, tmp_path, {"A": "x"})
    assert lines == [f"{{{core}}} x False".encode()]


async def test_a_grandchild_that_holds_the_pipe_delays_nothing(tmp_path: Path):
    """A daemonised grandchild keeps stdout open; the child's end is noticed all the same."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    with anyio.fail_after(20):
        exit_code, lines = await run(python(code), tmp_path)
    os.kill(int(lines[0]), signal.SIGKILL)
    assert exit_code == 0


async def test_a_missing_program_is_an_os_error(tmp_path: Path):
    """The supervisor turns it into an exit code."""
    with pytest.RaisesGroup(FileNotFoundError):
        await run(ServiceSpec(name="p", argv=("/no/such/program",), ready=""), tmp_path)


SUPERVISOR = """
import anyio, sys
from pathlib import Path
from services.cli.processes import ProcessSpawner
from services.cli.supervisor import ServiceSpec
from shared.clock import SystemClock

async def main():
    async with anyio.create_task_group() as tasks:
        spawner = ProcessSpawner(tasks, SystemClock(), Path("/"), {}, lambda *_: None)
        child = await spawner.spawn(ServiceSpec(name="c", argv=("/bin/sleep", "60"), ready=""))
        print(child.pid, flush=True)
        await child.wait()

anyio.run(main)
"""


def test_children_die_with_a_killed_supervisor():
    """kill -9 of the supervisor leaves nothing behind."""
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, cwd=root) as supervisor:
        assert supervisor.stdout
        child = ProcessId.of(int(supervisor.stdout.readline()))
        assert child is not None
        pidfd = os.pidfd_open(child.pid)
        supervisor.kill()
    wait_for_end(pidfd)
    assert not child.alive()


def wait_for_end(pidfd: int) -> None:
    import select

    assert select.select([pidfd], [], [], 20)[0], "the child lives on"
    os.close(pidfd)


def test_a_recycled_pid_is_another_process():
    """Only pid and start time together name a process; a zombie is none."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.alive()
    impostor = ProcessId(me.pid, me.start - 1)
    assert not impostor.alive()
    assert not impostor.send(signal.SIGKILL)  # or this test would not see the next line
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessId.of(child.pid) is None
    child.wait()


def test_lines_are_cut_whatever_the_pieces():
    """Any split of the bytes gives the same lines; an endless line comes in bounded pieces."""
    text = b"one\n\ntwo" + b"x" * 10 + b"\nlast"
    for size in range(1, len(text)):
        out: list[bytes] = []
        buffer = LineBuffer(out.append)
        for start in range(0, len(text), size):
            buffer.feed(text[start : start + size])
        buffer.flush()
        assert out == text.split(b"\n")
    out = []
    buffer = LineBuffer(out.append)
    for _ in range(100):
        buffer.feed(b"y" * 10_000)
    buffer.flush()
    assert b"".join(out) == b"y" * 1_000_000
    assert max(map(len, out)) <= MAX_LINE_BYTES + 10_000
