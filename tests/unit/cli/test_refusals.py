"""What cannot work is said in one line, before anything starts."""

import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli import rundir
from services.cli.main import main

Say = Callable[..., tuple[object, str]]


@pytest.fixture
def baton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    """Runs the command in this process; (exit code, all that it printed)."""
    monkeypatch.setattr(rundir, "base_folder", lambda: tmp_path)

    def run(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        return ended.value.code, captured.out + captured.err

    return run


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_a_busy_port(baton: Say):
    """Some other program listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, out = baton("up", "--port", str(port))
    assert (code, out) == (1, f"baton: port {port} is in use by another program; choose another one with --port\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/model.gguf"), "baton: model /no/such/model.gguf: no such file or folder"),
        (("--model", "gpt2"), "baton: model gpt2: no such file or folder; a hub id is owner/name"),
        (("--config", "/no/such.toml"), "baton: configuration file /no/such.toml: No such file or directory"),
        (("--transport", "pigeon"), "baton: --transport: Invalid enum value 'pigeon'"),
        (("--quantize", "int3"), "baton: --quantize: Invalid enum value 'int3'"),
        (("--kv-dtype", "int4"), "baton: --kv-dtype: Invalid enum value 'int4'"),
        (("--num-blocks", "many"), "--num-blocks"),
        (("--max-num-seqs", "0"), "baton: configuration: engine.max_num_seqs must be above 0, got 0"),
        (("--decode", "0"), "baton: --decode must be from 1 to 256, got 0"),
        (("--prefill", "-1"), "baton: --prefill must be from 0 (aggregated mode) to 256, got -1"),
        (("--host", "192.0.2.7"), "baton: --host 192.0.2.7: this machine has no such address"),
        (("--port", "70000"), "baton: the port must be from 1 to 65535, got 70000"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_options(baton: Say, arguments: tuple[str, ...], message: str):
    """The message names the option or the field; the exit code is not 0."""
    code, out = baton("up", "--port", str(free_port()), *arguments)
    assert code not in (0, None)
    assert message in out


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://user:secret@127.0.0.1:1/0", "baton: redis at redis://127.0.0.1:1/0: redis does not answer"),
        ("rodis://x", "baton: redis URL: "),
    ],
)
def test_a_redis_that_is_not_there(baton: Say, url: str, message: str):
    """The address is named, its password is not."""
    code, out = baton("up", "--port", str(free_port()), "--redis-url", url)
    assert code == 1
    assert message in out
    assert "secret" not in out


def test_an_old_redis(baton: Say):
    """A server that says it is 5.0.7."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        player = threading.Thread(target=play_old_redis, args=(server,))
        player.start()
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        code, out = baton("up", "--port", str(free_port()), "--redis-url", url)
        player.join()
    assert code == 1
    assert "redis 5.0.7 is too old: 6.2 or newer is needed" in out


def play_old_redis(server: socket.socket) -> None:
    """Answer OK to everything, and INFO with an old version, until the client leaves."""
    body = "# Server\r\nredis_version:5.0.7\r\n"
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(4096):
            answer = f"${len(body)}\r\n{body}\r\n" if b"INFO" in data else "+OK\r\n"
            connection.sendall("".join(["+OK\r\n"] * (data.count(b"*") - 1) + [answer]).encode())


def test_down_without_a_stack(baton: Say):
    """Stopping twice is no fault."""
    assert baton("down", "--port", "1") == (0, "Nothing runs on port 1.\n")


@pytest.mark.parametrize("arguments", [(), ("--port", "1")])
def test_status_without_a_stack(baton: Say, arguments: tuple[str, ...]):
    """The exit code says it to scripts."""
    code, out = baton("status", *arguments)
    assert code == 1
    assert "nothing runs" in out


def test_chat_without_a_server(baton: Say):
    """It says how to start one."""
    code, out = baton("chat", "--port", str(free_port()), "--message", "Hello")
    assert code == 1
    assert out.endswith("start it with './baton up'\n")


@pytest.mark.parametrize("words", [("down",), ("status",), ("queue", "ls"), ("chat", "-m", "hi")], ids=lambda w: w[0])
@pytest.mark.parametrize("port", ["-5", "0", "70000"])
def test_a_port_that_cannot_be_is_refused(baton: Say, words: tuple[str, ...], port: str):
    """By every command that names a stack by it; exit code 2, as for any wrong use."""
    code, out = baton(*words, "--port", port)
    assert code == 2
    assert "--port" in out
