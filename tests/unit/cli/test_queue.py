"""`baton queue` over a real Redis: what it lists, shows and submits again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from services.cli import rundir
from services.cli.errors import CommandError
from services.cli.main import app
from services.cli.procinfo import ProcessId
from services.cli.rundir import RunDir, RunState
from shared.keys import Keys

KEYS = Keys("baton")


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis[str]"]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def bury(client: "redis.Redis[str]", name: str, reason: str = "three attempts") -> None:
    """As `submit_end.lua` leaves it."""
    client.xadd(KEYS.dead(), {"reason": reason, "entry": "7-0", "id": name, "request": '{"prompt": "x"}'})
    client.hset(KEYS.submission(name), mapping={"entry": "7-0", "state": "done"})
    client.xadd(KEYS.result(name), {"status": "500", "error": '{"error": "told"}'})


def run(*words: str, url: str = "") -> str:
    """What the command prints.

    :raises CommandError: as `main` prints it.
    """
    options = ("--redis-url", url) if url else ()
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["queue", *words, *options])
    if isinstance(result.exception, CommandError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_ls_counts_and_lists_the_newest_first(client: "redis.Redis[str]", redis_url: str) -> None:
    """With the reason."""
    assert run("ls", url=redis_url) == "0 waiting, 0 in work, 0 dead\n"
    bury(client, "one")
    bury(client, "two", "no token in 8 attempts")
    client.xadd(KEYS.submit(), {"request": "{}"})
    out = run("ls", url=redis_url)
    assert out.startswith("1 waiting, 0 in work, 2 dead\n")
    assert out.index("two") < out.index("one")
    assert "no token in 8 attempts" in out
    assert "one" not in run("ls", "--limit", "1", url=redis_url)


def test_show_prints_all_that_is_known(client: "redis.Redis[str]", redis_url: str) -> None:
    """The submission, the reason, and what the client was told; a long body is cut."""
    bury(client, "one")
    out = run("show", "one", url=redis_url)
    for text in ("three attempts", "7-0", '{"prompt": "x"}', '500 {"error": "told"}'):
        assert text in out
    client.xadd(KEYS.dead(), {"reason": "r", "entry": "8-0", "id": "long", "request": "x" * 5000})
    assert "(5000 characters)" in run("show", "long", url=redis_url)


def test_retry_submits_it_again(client: "redis.Redis[str]", redis_url: str) -> None:
    """The letter is gone, the id is free."""
    bury(client, "one")
    out = run("retry", "one", url=redis_url)
    [(entry, fields)] = client.xrange(KEYS.submit())
    assert fields == {"id": "one", "request": '{"prompt": "x"}'}
    assert entry in out
    assert client.xlen(KEYS.dead()) == 0
    assert not client.exists(KEYS.result("one"), KEYS.submission("one"))


@pytest.mark.parametrize("command", ["show", "retry"])
def test_an_unknown_letter_is_an_error(client: "redis.Redis[str]", redis_url: str, command: str) -> None:
    """That says where to look."""
    with pytest.raises(CommandError, match="queue ls"):
        run(command, "nobody", url=redis_url)


def test_work_of_the_same_id_is_not_disturbed(client: "redis.Redis[str]", redis_url: str) -> None:
    """The client was faster than the operator."""
    bury(client, "one")
    client.hset(KEYS.submission("one"), "state", "open")
    with pytest.raises(CommandError, match="in work"):
        run("retry", "one", url=redis_url)


def test_the_running_stacks_redis_is_the_one(
    client: "redis.Redis[str]", redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its state file; a port where nothing runs is an error, not another Redis."""
    monkeypatch.setattr(rundir, "base_folder", lambda: tmp_path)
    me = ProcessId.of(os.getpid())
    assert me is not None
    folder = RunDir(8123)
    folder.acquire()
    folder.save(RunState(pid=me.pid, start=me.start, phase="ready", url="", redis_url=redis_url))
    bury(client, "one")
    assert "1 dead" in run("ls", "--port", "8123")
    with pytest.raises(CommandError, match="8124"):
        run("ls", "--port", "8124")


def test_without_a_stack_no_foreign_redis_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens at the default address may be anybody's."""
    monkeypatch.setattr(rundir, "base_folder", lambda: tmp_path)
    monkeypatch.delenv("BATON_REDIS_URL", raising=False)
    monkeypatch.delenv("BATON_CONFIG", raising=False)
    with pytest.raises(CommandError, match=r"nothing runs on port 8000; './baton up' starts it.*--redis-url"):
        run("ls")


@pytest.mark.parametrize("by_file", [False, True])
def test_without_a_stack_the_configured_redis_is_the_one(
    client: "redis.Redis[str]", redis_url: str, by_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where the environment names it."""
    monkeypatch.setattr(rundir, "base_folder", lambda: tmp_path)
    monkeypatch.delenv("BATON_REDIS_URL", raising=False)
    if by_file:
        file = tmp_path / "baton.toml"
        file.write_text(f'[redis]\nurl = "{redis_url}"\n')
        monkeypatch.setenv("BATON_CONFIG", str(file))
    else:
        monkeypatch.setenv("BATON_REDIS_URL", redis_url)
    bury(client, "one")
    assert "1 dead" in run("ls")
