"""The command as a user has it: real processes, a real Redis, services that only pretend."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from services.cli.down import stop
from services.cli.procinfo import ProcessId
from services.cli.rundir import RunDir, RunState
from shared.clock import SystemClock

ROOT = Path(__file__).resolve().parents[3]
FAKE = ROOT / "tests" / "unit" / "cli" / "fake_baton.py"


class Command:
    """Runs `baton` over the fakes, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        self.env = kept | {"FAKE_DIR": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, str(FAKE), *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as process:
            out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def up(self, *more: str) -> tuple[int, str]:
        return self("up", "--port", str(self.port), *more)

    def down(self) -> tuple[int, str]:
        return self("down", "--port", str(self.port))

    def state(self) -> RunState:
        state = RunDir(self.port, self.folder / "run").load()
        assert state is not None
        return state

    def processes(self) -> list[ProcessId]:
        return [ProcessId(s.pid, s.start) for s in self.state().services]


@pytest.fixture
def baton(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    anyio.run(stop, RunDir(command.port, tmp_path / "run"), SystemClock())


def test_detach_status_and_down(baton: Command):
    """Up returns when all is ready; status shows every process; a second up is refused; down drains in order."""
    code, out = baton.up("--detach", "--prefill", "2")
    assert code == 0, out
    assert f"Baton is ready: http://127.0.0.1:{baton.port} (SmolLM2-135M-Instruct, 2 prefill, 1 decode) in " in out
    gateway = next(s for s in baton.state().services if s.name == "gateway")
    assert f"  metrics  {gateway.url}/metrics\n" in out
    assert not gateway.url.endswith(f":{baton.port}")
    processes = baton.processes()
    names = ["redis", "prefix-index", "scheduler", "gateway", "prefill-0", "prefill-1", "decode-0"]
    assert [s.name for s in baton.state().services] == names
    assert all(p.alive() for p in processes)

    code, out = baton("status")
    assert code == 0
    assert all(name in out for name in names)
    assert "done 7" in out
    assert all(f"{s.url}/metrics\n" in out for s in baton.state().services if s.url)

    code, out = baton.up()
    assert (code, out.count("\n")) == (1, 1)
    assert f"baton: Baton already runs on port {baton.port}" in out

    code, out = baton.down()
    assert (code, out) == (0, f"Stopped port {baton.port}.\n")
    assert not any(p.alive() for p in processes)
    ended = [line.split()[0] for line in (baton.folder / "ended").read_text().splitlines()]
    assert ended[:2] == ["gateway", "scheduler"]
    assert sorted(ended[2:5]) == ["decode", "prefill", "prefill"]
    assert ended[5:] == ["prefix_index"]
    assert baton("status")[0] == 1


def test_foreground_drains_on_sigterm_with_exit_code_0(baton: Command):
    """It prints warnings with their service's name, says when it is ready, and ends cleanly."""
    with baton.start("up", "--port", str(baton.port), "--prefill", "0") as process:
        lines = read_until(process, "Baton is ready")
        assert "aggregated, 1 decode" in lines[-1]
        assert "[decode-0] warning: odd (name=decode-0)\n" in lines
        assert not any("listening" in line for line in lines)
        children = baton.processes()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Draining" in rest
    assert rest.endswith("Stopped.\n")
    assert not any(p.alive() for p in children)


def test_kill_9_leaves_nothing_behind_and_up_works_again(baton: Command):
    """Children die with their supervisor; its state file does not keep the next one from starting."""
    assert baton.up("--detach")[0] == 0
    children = [os.pidfd_open(p.pid) for p in baton.processes()]
    assert baton.state().supervisor.send(signal.SIGKILL)
    for pidfd in children:
        wait_for_end(pidfd)
    assert baton("status")[0] == 1
    code, out = baton.up("--detach")
    assert code == 0, out


def test_a_dead_service_comes_back(baton: Command):
    """Killed with SIGKILL, it has another pid, and the restart is counted."""
    with baton.start("up", "--port", str(baton.port)) as process:
        read_until(process, "Baton is ready")
        before = {s.name: s for s in baton.state().services}
        os.kill(before["decode-0"].pid, signal.SIGKILL)
        lines = read_until(process, "[decode-0] is back")
        after = {s.name: s for s in baton.state().services}
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert any("[decode-0] died (killed by SIGKILL); starting it again in 0.25 s" in line for line in lines)
    assert after["decode-0"].restarts == 1
    assert after["decode-0"].pid != before["decode-0"].pid
    assert after["prefill-0"] == before["prefill-0"]
    assert process.returncode == 0


@pytest.mark.parametrize("mode", [(), ("--detach",)], ids=["foreground", "detach"])
def test_a_service_that_will_not_start_is_a_clear_failure(baton: Command, mode: tuple[str, ...]):
    """Everything is stopped, the exit code is 1, and the end of its log is shown."""
    (baton.folder / "scheduler.broken").write_text("3")
    code, out = baton.up(*mode)
    assert code == 1
    assert "baton: scheduler keeps dying (exit code 3); everything was stopped. Its log:" in out
    assert "error: no such luck (room=scheduler)" in out
    assert "Traceback" not in out
    assert RunDir(baton.port, baton.folder / "run").load() is None


def test_a_wrong_configuration_of_a_service_is_not_tried_again(baton: Command):
    """Exit code 2 ends the start at once."""
    (baton.folder / "scheduler.broken").write_text("2")
    code, out = baton.up()
    assert code == 1
    assert "baton: scheduler refuses to start (exit code 2)" in out
    assert out.count("died (") == 0


def test_a_service_deaf_to_sigterm_is_killed(baton: Command):
    """The drain is bounded."""
    (baton.folder / "decode.stuck").touch()
    assert baton.up("--detach")[0] == 0
    processes = baton.processes()
    assert baton.down()[0] == 0
    assert not any(p.alive() for p in processes)


def test_down_never_kills_a_recycled_pid(baton: Command):
    """A state file that names a pid which is now another process's."""
    with subprocess.Popen(["/bin/sleep", "60"]) as bystander:
        identity = ProcessId.of(bystander.pid)
        assert identity is not None
        folder = baton.folder / "run" / str(baton.port)
        folder.mkdir(parents=True)
        service = {"name": "a", "state": "ready", "pid": bystander.pid, "start": 1, "restarts": 0, "url": ""}
        old = {"pid": bystander.pid, "start": identity.start - 5, "phase": "ready", "url": "", "redis_url": ""}
        (folder / "state.json").write_text(json.dumps(old | {"services": [service]}))
        assert baton.down()[0] == 0
        assert bystander.poll() is None
        bystander.kill()


def read_until(process: "subprocess.Popen[str]", text: str) -> list[str]:
    """Lines up to and including the first that holds `text`."""
    assert process.stdout
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"never said {text!r}: {''.join(lines)}")


def wait_for_end(pidfd: int) -> None:
    import select

    assert select.select([pidfd], [], [], 20)[0], "a child lives on"
    os.close(pidfd)
