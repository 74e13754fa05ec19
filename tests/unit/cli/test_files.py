"""What is kept on disk and what is shown: state, lock, logs, the choice of a Redis."""

import json
import multiprocessing
from pathlib import Path

import pytest

from services.cli.errors import CommandError
from services.cli.logs import LogFile, LogSink, parse_line
from services.cli.redis_server import find_redis, server_version
from services.cli.rundir import MAX_SOCKET_PATH, RunDir, RunState, ServiceState


def state(pid: int = 1) -> RunState:
    service = ServiceState(name="gateway", state="ready", pid=2, start=3, restarts=0, url="http://x")
    return RunState(pid=pid, start=1, phase="ready", url="http://x", redis_url="unix:///y", services=(service,))


def test_state_is_private_and_survives_a_round_trip(tmp_path: Path):
    """What was saved is loaded; only this user may read it (it may hold a Redis password)."""
    run_dir = RunDir(8000, tmp_path)
    run_dir.acquire()
    run_dir.save(state())
    assert run_dir.load() == state()
    assert (tmp_path / "8000" / "state.json").stat().st_mode & 0o077 == 0
    assert [r.port for r in RunDir.all(tmp_path)] == [8000]
    run_dir.clear()
    assert run_dir.load() is None


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x"}', "[]"])
def test_a_damaged_state_file_is_none(tmp_path: Path, content: str):
    """A file of another version or cut short stops nobody."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "state.json").write_text(content)
    assert RunDir(1, tmp_path).load() is None


def test_a_second_stack_on_a_port_is_refused_by_name(tmp_path: Path):
    """The lock is the first one's until it ends; the message says how to stop it."""
    first = RunDir(8000, tmp_path)
    first.acquire()
    first.save(state(pid=4711))
    with pytest.raises(CommandError, match=r"already runs on port 8000 \(pid 4711\); '\./baton down --port 8000'"):
        RunDir(8000, tmp_path).acquire()
    RunDir(8001, tmp_path).acquire()


def test_a_long_path_gets_its_socket_elsewhere(tmp_path: Path):
    """A unix socket's path has a limit that a deep folder exceeds."""
    assert RunDir(1, Path("/r")).socket_path("s") == Path("/r/1/sockets/s")
    assert RunDir(1, Path("/r")).worker_sockets == "/r/1/sockets"
    moved = RunDir(1, tmp_path / ("d" * 100)).socket_path("redis.sock")
    assert len(str(moved)) <= MAX_SOCKET_PATH
    assert moved.parent.stat().st_mode & 0o077 == 0
    moved.parent.rmdir()
    assert RunDir(1, tmp_path / ("d" * 100)).worker_sockets == ""


def test_sockets_of_a_killed_run_are_cleared(tmp_path: Path):
    """Its names are random, so they would only pile up."""
    run_dir = RunDir(8000, tmp_path)
    run_dir.acquire()
    run_dir.socket_path("old.sock").touch()
    run_dir.clear_sockets()
    assert not list(run_dir.sockets.iterdir())


def fake_redis(folder: Path, text: str) -> Path:
    folder.mkdir()
    file = folder / "redis-server"
    file.write_text(f"#!/bin/sh\necho '{text}'\n")
    file.chmod(0o755)
    return file


def test_the_machines_redis_is_taken_if_new_enough(tmp_path: Path):
    """7.2 is fine, and comes before the shipped one."""
    file = fake_redis(tmp_path / "new", "Redis server v=7.2.4 sha=00000000:0 malloc=libc bits=64 build=0")
    assert find_redis(str(file.parent)) == file
    assert server_version(file) == (7, 2, 4)


@pytest.mark.parametrize("text", ["Redis server v=6.0.16 sha=0", "Redis server v=5.0.7 sha=0", "hello"])
def test_an_old_redis_is_passed_over_for_the_shipped_one(tmp_path: Path, text: str):
    """The one that comes with the packages is new enough."""
    found = find_redis(str(fake_redis(tmp_path / "old", text).parent))
    version = server_version(found)
    assert version is not None
    assert version >= (6, 2)


def test_only_an_old_redis_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where nothing is shipped, the message says what was found and what is needed."""
    file = fake_redis(tmp_path / "old", "Redis server v=5.0.7 sha=0")
    monkeypatch.setattr("services.cli.redis_server.find_spec", lambda _: None)
    with pytest.raises(CommandError, match=r"6\.2 or newer is needed \(.*/old/redis-server is 5\.0\.7\)"):
        find_redis(str(file.parent))
    with pytest.raises(CommandError, match="none found"):
        find_redis(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ('{"event": "up", "level": "info", "port": 1}', "info", "info: up (port=1)"),
        (
            '{"event": "e", "level": "error", "exception": "Trace\\nback", "timestamp": "t"}',
            "error",
            "error: e\nTrace\nback",
        ),
        ("Traceback (most recent call last):", "warning", "Traceback (most recent call last):"),
        ("2026-01-01 [info     ] listening", "info", "2026-01-01 [info     ] listening"),
        ('{"no": "event"}', "warning", '{"no": "event"}'),
        ("{broken", "warning", "{broken"),
    ],
)
def test_a_line_has_a_level_and_a_text(line: str, level: str, text: str):
    """Our JSON lines become readable, and whatever is not ours counts as a warning."""
    assert parse_line(line) == (level, text)


def test_the_terminal_gets_warnings_and_the_file_everything(tmp_path: Path):
    """Quiet services (Redis) never reach the terminal; the last lines are kept for all."""
    shown: list[tuple[str, str]] = []
    sink = LogSink(tmp_path, lambda name, text: shown.append((name, text)), quiet=frozenset({"redis"}))
    lines = [json.dumps({"event": f"e{i}", "level": level}) for i, level in enumerate(("info", "warning", "debug"))]
    for line in lines:
        sink.line("decode-0", line.encode())
    sink.line("redis", b"# WARNING overcommit")
    sink.line("decode-0", b"\xff not utf-8")
    sink.close()
    assert shown == [("decode-0", "warning: e1"), ("decode-0", "\N{REPLACEMENT CHARACTER} not utf-8")]
    assert (tmp_path / "decode-0.log").read_bytes() == "\n".join(lines).encode() + b"\n\xff not utf-8\n"
    assert sink.last_lines("redis") == "# WARNING overcommit"


def test_a_full_log_file_is_put_aside(tmp_path: Path):
    """Two files at most, of bounded size."""
    log = LogFile(tmp_path / "a.log", max_bytes=100)
    for i in range(100):
        log.write(b"line %03d" % i)
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert all(p.stat().st_size < 120 for p in tmp_path.iterdir())
    assert (tmp_path / "a.log").read_bytes().endswith(b"line 099\n")


def test_the_lock_ends_with_its_process(tmp_path: Path):
    """A killed supervisor blocks nobody."""
    context = multiprocessing.get_context("spawn")
    holder = context.Process(target=_hold, args=(tmp_path,))
    holder.start()
    holder.join()
    RunDir(8000, tmp_path).acquire()


def _hold(base: Path) -> None:
    RunDir(8000, base).acquire()
