"""Each script of `shared/lua` by itself: short, with its keys declared and in one hash slot, its deadlines by Redis'
clock, and equal to a model written in Python, whatever state it finds."""

import os
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from inspect import signature
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from shared.ids import RequestId
from shared.keys import Channel, Keys
from shared.leases import FOREVER_MS
from shared.scripts import sources
from tests.redis_server import RedisServer
from tests.unit.shared.lua_models import LIVE, NOW_MS, NOW_S, NOW_US, WORK, State
from tests.unit.shared.lua_models_lives import LIVES
from tests.unit.shared.lua_models_queue import QUEUE

MAX_LINES = 40
EXAMPLES = int(os.environ.get("BATON_LUA_EXAMPLES", "50"))
MODELS = WORK | LIVES | QUEUE
OWN_TESTS = {"limit", "limit_leave", "limit_renew"}
"""See `test_api_keys.py`."""
DECLARED = ("KEYS[", "string.sub(KEYS[")
"""A key as it is given; and the logs of further choices, whose names are made of the first one's, in the same slot."""
CALL = re.compile(r"redis\.call\('(\w+)', ?([^,)]*)")
BOUND = re.compile(r"local ([\w, ]+) = (.*)")


# --- as they are written ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(sources()))
def test_a_script_is_short(name: str) -> None:
    """One atomic step is one page to read."""
    code = [line for line in sources()[name].splitlines() if not line.startswith("--")]
    assert len(code) <= MAX_LINES


def keys_bound(text: str) -> set[str]:
    """Local names that stand for a declared key."""
    names: set[str] = set()
    for left, right in BOUND.findall(text):
        for name, value in zip(left.split(","), right.split(","), strict=False):
            if value.strip().startswith(DECLARED):
                names.add(name.strip())
    return names


@pytest.mark.parametrize("name", sorted(sources()))
def test_every_key_is_declared(name: str) -> None:
    """A script touches the keys that it is given, and makes up none: else a cluster could not route it."""
    bound = keys_bound(sources()[name])
    for command, key in CALL.findall(sources()[name]):
        if command != "TIME":
            assert key.startswith(DECLARED) or key in bound, f"{command} {key}"


@pytest.mark.parametrize("name", sorted(sources()))
def test_every_deadline_is_by_redis_clock(name: str) -> None:
    """Who writes a deadline or compares with one asks for the time in the script itself."""
    text = sources()[name]
    deadlines = re.findall(r"ZADD', KEYS\[\d+\], (?!0,)|> ?t\[1\]|deadline\)? > t", text)
    assert not deadlines or "redis.call('TIME')" in text


def test_a_finder_of_keys_can_fail() -> None:
    """It sees a key that is made up, and one behind a local name."""
    text = "local a, b = KEYS[1], ARGV[1]\nredis.call('GET', a)\nredis.call('GET', b)\nredis.call('GET', 'x' .. a)"
    assert keys_bound(text) == {"a"}
    assert [key for _, key in CALL.findall(text)] == ["a", "b", "'x' .. a"]


def test_all_keys_of_a_cell_are_in_one_slot() -> None:
    """So that a script may touch any of them, in a cluster too."""
    keys = Keys("cell-7")
    made: list[Any] = []
    for name in [name for name in dir(keys) if not name.startswith("_") and name != "cell"]:
        method = getattr(keys, name)
        needed = [p for p in signature(method).parameters.values() if p.default is p.empty]
        made.append(method(*("a" for _ in needed)))
    names = [key.key if isinstance(key, Channel) else key for key in (*made, keys.log(RequestId("b"), 3))]
    assert len(names) >= 20
    assert len({key_slot(name.encode()) for name in names}) == 1


# --- as they run -----------------------------------------------------------------------------------

PRELUDE = f"""
local real = redis
local redis = setmetatable({{call = function(name, ...)
  if name == 'TIME' then return {{'{NOW_S}', '{NOW_US}'}} end
  return real.call(name, ...)
end}}, {{__index = real}})
"""
"""Stops the server's clock. Of ids and TTLs only the presence is compared."""

text, epochs, blocks = st.sampled_from, st.sampled_from((1, 2)), st.integers(0, 9)
attempts, workers = text(("a", "b")), text(("d", "e"))
packed = st.integers(0, 3).map(lambda n: b"".join(i.to_bytes(4, "little") for i in range(n)))
deadlines = text((0, NOW_MS - 5, NOW_MS, NOW_MS + 5000))
worker = st.fixed_dictionaries(
    {"state": text(("up", "draining", "dead")), "blocks": st.just("9"), "taken": blocks.map(str)}
)
held = st.dictionaries(text(("r/1", "r/2")), blocks.map(str), min_size=1)
record = st.builds(
    lambda st, ep, at, ho, pw, dw, tries, nonce: {
        **{"st": st, "ep": str(ep), "gw": "g", "tries": str(tries), "body": "body", "fin": "fin", "nonce": nonce},
        **({"at": at or "a", "ho": ho, "pw": pw, "dw": dw} if at or st in LIVE else {}),
    },
    text(("queued", "dispatched", "prefill", "decode", "done", "cancelled")),
    epochs,
    text(("", "a", "b")),
    text(("d", "p", "")),
    text(("-", "p")),
    workers,
    st.integers(0, 2),
    text(("", "n1")),
)
submission = st.builds(
    lambda entry, state, owner, reply, total: {
        **{"entry": entry, "state": state, "owner": owner, "reply": reply, "total": str(total), "seq": "0"},
        **{"tries": "1", "n:0": str(total), "c:0": str(2 * total)},
    },
    text(("1-1", "2-1")),
    text(("open", "done")),
    text(("g", "h")),
    text(("", "{t}:reply")),
    st.integers(0, 3),
)
pending = st.dictionaries(text(("1-1", "2-1")), text(("g", "h")))
zset_of_r = st.fixed_dictionaries({}, optional={"r": deadlines, "other": deadlines})
STREAMS = ("tokens", "sched", "control_p", "control_d", "work_d", "work_p", "reply")
ROLES: dict[str, st.SearchStrategy[Any]] = {
    "req": record,
    "log": packed.filter(bool),
    "queued": zset_of_r,
    "leases": zset_of_r,
    "gateways": st.dictionaries(text(("g", "h")), deadlines),
    "workers": st.dictionaries(text(("d", "e")), deadlines),
    "open": st.sets(text(("r", "other"))),
    "open_before": st.sets(text(("r", "other"))),
    "worker_d": worker,
    "worker_p": worker,
    "held_d": held,
    "held_p": held,
    "leader": st.fixed_dictionaries({"term": text(("1", "2"))}),
    "sub": submission,
    "submit": st.builds(lambda p: {"entries": {"1-1": [b"id", b"s"], "2-1": [b"id", b"s"]}, "pending": p}, pending),
    **dict.fromkeys(
        ("tokens", "sched", "control_p", "control_d", "work_d", "work_p", "reply"), st.just([("*", [b"m", b"0"])])
    ),
    "result": st.builds(list),
    "dead": st.builds(lambda: [("5-1", [b"reason", b"why"])]),
}
M = [b"m%d" % i for i in range(6)]
ms = st.just(60_000)
until = text((NOW_MS - 1, NOW_MS, FOREVER_MS))
ARGS: dict[str, tuple[Any, ...]] = {
    "admit": ("r", b"body", "g", st.integers(1, 2), M[0], epochs, packed),
    "lead": ("s",),
    "dispatch": ("r", epochs, attempts, text(("1", "2")), workers, blocks, M[0], text(("-", "p")), M[1]),
    "accept": ("r", epochs, attempts, text(("d", "p")), text(("prefill", "decode")), ms, text((b"", M[0])), ms),
    "renew": (text(("d", "p")), ms, "r", epochs, attempts),
    "emit": (epochs, attempts, st.integers(0, 4), packed, M[0]),
    "complete": ("r", epochs, attempts, M[0], M[1], ms),
    "cancel": ("r", epochs, text(("", "-", "p")), text(("", "d", "e")), *M[:3], ms, ms),
    "cancel_choice": (epochs, workers, M[0], ms),
    "requeue": (
        "r",
        epochs,
        text(("-", "p")),
        workers,
        text(("", "d", "p", "x")),
        st.integers(1, 4),
        *M[:4],
        ms,
        ms,
        until,
    ),
    "fail": ("r", epochs, M[0], M[1], ms),
    "refund": (text(("r/1", "r/2", "q/1")), text(("", "0", "3", "9")), M[0]),
    "register": ("d", b"reg", 9, ms, M[0]),
    "heartbeat": ("d", ms),
    "retire": ("d", text(("draining", "dead")), M[0]),
    "bury": ("d", until),
    "forget": ("d",),
    "clamp": (text((1000, 60_000)),),
    "greet": ("g", ms),
    "bury_gateway": ("g", until),
    "forget_gateway": ("g",),
    "submit_open": ("g", "gateways", text(("1-1", "2-1")), "s", "{t}:result", ms, text(("n1", "n2"))),
    "result_add": (
        "g",
        ms,
        "s",
        text(("1-1", "2-1")),
        0,
        st.integers(0, 4),
        st.integers(0, 2),
        st.integers(0, 9),
        "[7]",
        "7 ",
    ),
    "submit_end": (
        "g",
        "gateways",
        text(("1-1", "2-1")),
        ms,
        "s",
        200,
        "result",
        b"{}",
        text(("", "why")),
        100,
        "id",
        "s",
    ),
    "submit_renew": ("g", "gateways", 0, ms, text(("1-1", "2-1"))),
    "submit_retry": (text(("5-1", "6-1")), "id", "s"),
    "submit_adopt": (
        *("g", "r", text(("1", "2")), text(("", "-", "p")), text(("", "d", "e")), text(("g", "h")), b"body2"),
        *(M[0], M[1], text(("n1", "n2")), ms, text(("1-1", "2-1"))),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[redis.Redis]:
    """One that keeps nothing on disk."""
    own = RedisServer()
    own.start()
    with redis.Redis.from_url(own.url, protocol=2) as client:
        for name in list(client.response_callbacks):
            del client.response_callbacks[name]
        client.execute_command("CONFIG SET", "appendonly", "no")
        yield client
    own.close()


def key_of(role: str) -> str:
    """The key that plays the role; a log's name ends with the choice."""
    return "{t}:log:0" if role == "log" else "{t}:" + role


def write(pipe: Any, role: str, value: Any, expires: bool) -> None:
    """Make the key what the state says."""
    key = key_of(role)
    if role == "submit":
        pipe.execute_command("XGROUP", "CREATE", key, "gateways", "0", "MKSTREAM")
        for entry, fields in value["entries"].items():
            pipe.execute_command("XADD", key, entry, *fields)
        for entry, consumer in value["pending"].items():
            pipe.execute_command("XCLAIM", key, "gateways", consumer, 0, entry, "FORCE", "JUSTID")
    elif isinstance(value, bytes):
        pipe.execute_command("SET", key, value)
    elif isinstance(value, list):
        for entry, fields in value:
            pipe.execute_command("XADD", key, entry, *fields)
    elif isinstance(value, set):
        pipe.execute_command("SADD", key, *sorted(value))
    elif any(isinstance(item, int) for item in value.values()):
        pipe.execute_command("ZADD", key, *(part for member, score in value.items() for part in (score, member)))
    else:
        pipe.execute_command("HSET", key, *(part for pair in value.items() for part in pair))
    if expires:
        pipe.execute_command("PEXPIRE", key, 1_000_000)


LOOK = """
local out = {}
for i, key in ipairs(KEYS) do
  local kind, value = redis.call('TYPE', key).ok, false
  if kind == 'hash' then value = redis.call('HGETALL', key) end
  if kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end
  if kind == 'set' then value = redis.call('SMEMBERS', key) end
  if kind == 'string' then value = redis.call('GET', key) end
  if kind == 'stream' then value = redis.call('XRANGE', key, '-', '+') end
  local pending = {}
  if kind == 'stream' and #redis.call('XINFO', 'GROUPS', key) > 0 then
    pending = redis.call('XPENDING', key, 'gateways', '-', '+', 100)
  end
  out[i] = {kind, value, redis.call('PTTL', key) > 0 and 1 or 0, pending}
end
return out
"""


def look(client: redis.Redis, roles: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """The server's keys as a state has them, and those that expire."""
    found = client.execute_command("EVAL", LOOK, len(roles), *map(key_of, roles))
    keys = {role: value(role, *row) for role, row in zip(roles, found, strict=True) if row[0] != b"none"}
    return keys, {role for role, row in zip(roles, found, strict=True) if row[2]}


def value(role: str, kind: bytes, raw: Any, _expires: int, pending: list[Any]) -> Any:
    if kind == b"string":
        return raw
    if kind == b"set":
        return {member.decode() for member in raw}
    if kind == b"stream":
        if role == "submit":
            waiting = {row[0].decode(): row[1].decode() for row in pending}
            return {"entries": {known_id(entry): fields for entry, fields in raw}, "pending": waiting}
        return [(known_id(entry) if role in ("result", "dead") else "*", fields) for entry, fields in raw]
    pairs = zip(raw[::2], raw[1::2], strict=True)
    return {k.decode(): int(v) if kind == b"zset" else v.decode() for k, v in pairs}


def known_id(entry: bytes) -> str:
    """`*` for an id that the server chose."""
    return "*" if int(entry.split(b"-")[0]) > 1_000_000 else entry.decode()


def shown(answer: Any) -> Any:
    """An answer without what the server chose; lists of members in order, a flat hash as a hash."""
    if isinstance(answer, bytes) and re.fullmatch(rb"\d{13}-\d+", answer):
        return "an id"
    if isinstance(answer, list) and len(answer) == 3 and isinstance(answer[2], list):
        return [*answer[:2], dict(zip(answer[2][::2], answer[2][1::2], strict=True))]
    return sorted(answer) if isinstance(answer, list) and all(isinstance(item, bytes) for item in answer) else answer


@st.composite
def situations(draw: Any, name: str) -> tuple[State, list[Any]]:
    """A state of the script's keys, and arguments."""
    found: dict[str, Any] = {}
    for role in MODELS[name][1]:
        if role == "submit" or draw(st.integers(0, 3)):
            value = deepcopy(draw(ROLES[role]))
            if value or role == "submit":
                found[role] = value
    ended = found.get("req", {}).get("st") in ("done", "cancelled")
    state = State(found, {role for role in ("req", "log") if ended and role in found})
    return state, [draw(arg) if isinstance(arg, st.SearchStrategy) else arg for arg in ARGS[name]]


def test_every_script_has_a_model() -> None:
    """A new script needs its own."""
    assert set(MODELS) == set(ARGS) == set(sources()) - OWN_TESTS


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(
    max_examples=int(os.environ.get("BATON_LUA_EXAMPLES", "60")), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_a_script_does_what_its_model_does(server: redis.Redis, name: str, data: st.DataObject) -> None:
    """The same answer, the same keys, the same messages, and the same keys on their way out; and a second call, as
    after a lost answer, too."""
    model, roles = MODELS[name]
    state, args = data.draw(situations(name))
    pipe = server.pipeline(transaction=False)
    pipe.execute_command("FLUSHALL")
    for role, value in state.keys.items():
        write(pipe, role, value, role in state.expiring)
    pipe.execute()
    for _ in range(2):
        real = server.execute_command("EVAL", PRELUDE + sources()[name], len(roles), *map(key_of, roles), *args)
        assert shown(real) == shown(model(state, *args)), name
        keys, expiring = look(server, roles)
        assert keys == state.keys
        assert expiring == state.expiring
