"""deploy/redis.conf and deploy/users.acl on a real Redis: what a client of the queue may do, and nothing else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from shared.keys import Keys
from tests.redis_server import RedisServer

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
KEYS = Keys("baton")
USERS = ("baton-submit", "baton-result")


@pytest.fixture(scope="module")
def deployed() -> Iterator[RedisServer]:
    """The shipped files, but for where data and users are; both users with a password."""
    server = RedisServer(str(DEPLOY / "redis.conf"), "--aclfile", str(DEPLOY / "users.acl"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def admin(deployed: RedisServer) -> Iterator["redis.Redis[bytes]"]:
    deployed.flush()
    with redis.Redis.from_url(deployed.url) as client:
        for user in USERS:
            client.acl_setuser(user, enabled=True, passwords=["+secret"])
        client.xadd(KEYS.submit(), {"request": "somebody else's"})
        client.xadd(KEYS.result("job"), {"text": "x"})
        client.xadd(KEYS.replies("me"), {"text": "x"})
        client.set(KEYS.deployment_key(), "secret")
        yield client


@pytest.fixture
def as_user(deployed: RedisServer, admin: Any) -> Iterator[Callable[[str], "redis.Redis[bytes]"]]:
    clients: list[redis.Redis[bytes]] = []

    def connect(user: str) -> "redis.Redis[bytes]":
        clients.append(redis.Redis(unix_socket_path=str(deployed.socket), username=user, password="secret"))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_each_user_can_do_its_part(as_user: Callable[[str], Any], admin: Any) -> None:
    """One submits, the other reads results and copies of them."""
    assert as_user("baton-submit").xadd(KEYS.submit(), {"id": "a", "request": "{}"})
    reader = as_user("baton-result")
    assert reader.xread({KEYS.result("job"): 0, KEYS.replies("me"): 0})
    assert reader.execute_command("XREAD", "BLOCK", "1", "STREAMS", KEYS.result("other"), "$") is not None


KEYED: dict[str, tuple[Any, ...]] = {
    "XADD": ("*", "f", "v"),
    "XREAD": (),
    "XRANGE": ("-", "+"),
    "XREVRANGE": ("+", "-"),
    "XLEN": (),
    "XDEL": ("0-1",),
    "XTRIM": ("MAXLEN", "0"),
    "DEL": (),
    "UNLINK": (),
    "EXPIRE": ("1",),
    "TYPE": (),
    "GET": (),
    "SET": ("x",),
    "DUMP": (),
    "RENAME": (KEYS.result("x"),),
}
ALLOWED = {("baton-submit", "XADD", KEYS.submit())} | {
    ("baton-result", "XREAD", key) for key in (KEYS.result("job"), KEYS.replies("me"))
}
OTHER_KEYS = (
    KEYS.sched().key,
    KEYS.dead(),
    KEYS.queued(),
    KEYS.deployment_key(),
    KEYS.submission("job"),
    "{other}:submit",
)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("command", KEYED)
def test_no_key_can_be_touched_otherwise(as_user: Callable[[str], Any], user: str, command: str) -> None:
    """Each command on each kind of key of the cell: refused, but for the one that is the user's part."""
    client = as_user(user)
    for key in (KEYS.submit(), KEYS.result("job"), KEYS.replies("me"), *OTHER_KEYS):
        words = ("COUNT", "1", "STREAMS", key, "0") if command == "XREAD" else (key, *KEYED[command])
        if (user, command, key) in ALLOWED:
            client.execute_command(command, *words)
        else:
            with pytest.raises(NoPermissionError):
                client.execute_command(command, *words)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "words",
    [
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("INFO",),
        ("CONFIG", "GET", "*"),
        ("FLUSHALL",),
        ("SHUTDOWN", "NOSAVE"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("MONITOR",),
        ("SUBSCRIBE", "x"),
        ("PUBLISH", "x", "y"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", KEYS.submit()),
        ("EVALSHA", "0" * 40, "0"),
        ("SCRIPT", "LOAD", "return 1"),
        ("MULTI",),
        ("DEBUG", "SLEEP", "0"),
        ("REPLICAOF", "NO", "ONE"),
        ("XGROUP", "CREATE", KEYS.submit(), "mine", "0"),
        ("XREADGROUP", "GROUP", "gateways", "me", "STREAMS", KEYS.submit(), ">"),
        ("XINFO", "STREAM", KEYS.submit()),
        ("XADD", KEYS.result("job"), "MAXLEN", "0", "*", "status", "200"),
    ],
    ids=lambda words: words[0],
)
def test_no_other_command_is_allowed(as_user: Callable[[str], Any], user: str, words: tuple[str, ...]) -> None:
    """Looking around, scripts, administration, other consumers' work."""
    with pytest.raises(NoPermissionError):
        as_user(user).execute_command(*words)


def test_the_users_are_off_as_shipped(deployed: RedisServer) -> None:
    """No password comes with the file."""
    with redis.Redis.from_url(deployed.url) as client:
        client.execute_command("ACL", "LOAD")
        for user in USERS:
            found = client.acl_getuser(user)
            assert "off" in found["flags"]
            assert found["passwords"] == []


def test_the_settings_keep_what_was_acknowledged_and_evict_nothing(deployed: RedisServer) -> None:
    """As the README promises."""
    with redis.Redis.from_url(deployed.url, decode_responses=True) as client:
        want = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "protected-mode": "yes"}
        assert {name: client.config_get(name)[name] for name in want} == want
    text = (DEPLOY / "redis.conf").read_text()  # the test's server is started with the first two once more
    assert "\nappendonly yes\nappendfsync always\n" in text
