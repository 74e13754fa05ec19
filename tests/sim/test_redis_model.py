"""The Redis in memory against the real one: the same commands and the same scripts leave the same answers and keys."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.leases import FOREVER_MS
from shared.scripts import sources
from tests.redis_server import RedisServer
from tests.sim.lua import evaluate
from tests.sim.redis_store import Store, Zset, raw
from tests.sim.redis_streams import Refused, Stream

NOW = 1_700_000_000.25
CLOCK = "__now"
_PRELUDE = f"""
local real = redis
local redis = setmetatable({{call = function(name, ...)
  if name == 'TIME' then return {{'{int(NOW)}', '{round(NOW % 1 * 1e6)}'}} end
  return real.call(name, ...)
end}}, {{__index = real}})
"""
"""Gives the real server the model's time; XADD's ids and TTLs stay its own and are compared by their order and
presence."""

KEYS = ("k1", "k2")
FIELDS = ("f1", "f2", "f3")
small = st.integers(-3, 12)
key, field = st.sampled_from(KEYS), st.sampled_from(FIELDS)
COMMANDS = st.one_of(
    st.tuples(st.just("HSET"), key, field, small),
    st.tuples(st.just("HDEL"), key, field, field),
    st.tuples(st.just("HGET"), key, field),
    st.tuples(st.just("HMGET"), key, field, field),
    st.tuples(st.just("HINCRBY"), key, field, small),
    st.tuples(st.sampled_from(("HKEYS", "HLEN", "EXISTS", "STRLEN", "GET", "ZCARD", "SCARD", "XLEN", "DEL")), key),
    st.tuples(st.just("SADD"), key, field, field),
    st.tuples(st.sampled_from(("SREM", "SISMEMBER", "ZREM", "ZSCORE")), key, field),
    st.tuples(st.just("ZADD"), key, st.integers(0, 1 << 50), field),
    st.tuples(st.just("ZRANGEBYSCORE"), key, st.just("-inf"), st.integers(0, 1 << 50)),
    st.tuples(st.just("ZRANGE"), key, st.just(0), st.just(-1)),
    st.tuples(st.just("ZRANGE"), key, st.just(0), st.just(-1), st.just("WITHSCORES")),
    st.tuples(st.sampled_from(("SETNX", "APPEND", "SET")), key, field),
    st.tuples(st.just("XADD"), key, st.just("*"), st.just("m"), field),
    st.tuples(st.just("XTRIM"), key, st.just("MAXLEN"), st.integers(0, 2)),
    st.tuples(st.just("PEXPIRE"), key, st.just(1_000_000)),
    st.tuples(st.just("PERSIST"), key),
)
consumer = st.sampled_from(("c1", "c2"))
entry_id = st.integers(1, 6).map(lambda n: f"{n}-1")
GROUP_COMMANDS = st.one_of(
    st.tuples(st.just("XADD"), key, entry_id, st.just("m"), field),
    st.tuples(st.just("XADD"), key, st.just("MAXLEN"), st.just("~"), st.just(100), entry_id, st.just("m"), field),
    st.tuples(
        *map(st.just, ("XGROUP", "CREATE")), key, st.just("g"), st.sampled_from(("0", "3-1")), st.just("MKSTREAM")
    ),
    st.tuples(
        *(st.just("XREADGROUP"), st.just("GROUP"), st.just("g"), consumer, st.just("COUNT"), st.integers(1, 3)),
        *(st.just("STREAMS"), key, st.just(">")),
    ),
    st.tuples(st.just("XACK"), key, st.just("g"), entry_id, entry_id),
    st.tuples(st.just("XDEL"), key, entry_id),
    entry_id.flatmap(lambda one: st.tuples(st.just("XRANGE"), key, st.just(one), st.just(one))),
    st.tuples(
        *(st.just("XCLAIM"), key, st.just("g"), consumer, st.just(0), entry_id),
        *(st.just("IDLE"), st.sampled_from((0, 500_000)), st.just("JUSTID")),
    ),
    st.tuples(
        *(st.just("XAUTOCLAIM"), key, st.just("g"), consumer, st.sampled_from((0, 100_000))),
        *(st.sampled_from(("0-0", "3-1")), st.just("COUNT"), st.integers(1, 3)),
    ),
)


@pytest.fixture(scope="module")
def server(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url, protocol=2) as client:
        for name in list(client.response_callbacks):
            del client.response_callbacks[name]
        yield client


def settled(answer: Any) -> Any:
    """An answer without what cannot be equal: ids of entries, the order of sets."""
    if isinstance(answer, list):
        return [settled(item) for item in answer]
    if isinstance(answer, bytes) and answer.count(b"-") == 1 and answer.replace(b"-", b"").isdigit():
        return "an id"
    return answer


def real_state(client: redis.Redis) -> dict[bytes, Any]:
    """Everything that the server has."""
    state: dict[bytes, Any] = {}
    for name in client.execute_command("KEYS", "*"):
        kind = client.execute_command("TYPE", name)
        expires = client.execute_command("PTTL", name) > 0
        if kind == b"hash":
            flat = client.execute_command("HGETALL", name)
            value: Any = dict(zip(flat[::2], flat[1::2], strict=True))
        elif kind == b"set":
            value = set(client.execute_command("SMEMBERS", name))
        elif kind == b"zset":
            flat = client.execute_command("ZRANGE", name, 0, -1, "WITHSCORES")
            value = {m: float(s) for m, s in zip(flat[::2], flat[1::2], strict=True)}
        elif kind == b"stream":
            entries = [fields for _, fields in client.execute_command("XRANGE", name, "-", "+")]
            groups = [row[1] for row in client.execute_command("XINFO GROUPS", name)]
            value = (entries, {group: real_pending(client, name, group) for group in groups})
        else:
            value = client.execute_command("GET", name)
        state[name] = (value, expires)
    return state


def real_pending(client: redis.Redis, name: bytes, group: bytes) -> list[bytes]:
    """Consumers of the pending entries, in the order of these."""
    return [row[1] for row in client.execute_command("XPENDING", name, group, "-", "+", 1000)]


def model_state(store: Store) -> dict[bytes, Any]:
    state: dict[bytes, Any] = {}
    for name in store.live_keys():
        value = store.data[name]
        if isinstance(value, Stream):
            groups = {k: [g.pending[e].consumer for e in sorted(g.pending)] for k, g in value.groups.items()}
            value = ([value.entries[entry] for entry in value.ids], groups)
        elif isinstance(value, Zset):
            value = dict(value)
        state[name] = (value, name in store.deadlines)
    return state


def both(client: redis.Redis, store: Store, command: tuple[Any, ...]) -> None:
    """Run a command on both. One that the server refuses for the key's type is not run on the model."""
    try:
        real = client.execute_command(*command)
    except redis.ResponseError as exc:
        if "WRONGTYPE" in str(exc) or "not an integer" in str(exc):
            return
        with pytest.raises(Refused, match=str(exc).split()[0] if str(exc).split()[0].isupper() else "equal or smaller"):
            on_model(store, command)
        return
    assert settled(on_model(store, command)) == settled(real), command


def on_model(store: Store, command: tuple[Any, ...]) -> Any:
    if command[0] == "XREADGROUP":
        _, _, group, reader, _, count, _, name, _ = command
        return store.streams.xreadgroup(raw(group), raw(reader), count, raw(name))
    return store.run(command[0].encode(), *command[1:])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(commands=st.lists(COMMANDS, max_size=25))
def test_every_command_does_what_redis_does(server: redis.Redis, commands: list[tuple[Any, ...]]) -> None:
    """Answers and keys, after any sequence of them."""
    server.execute_command("FLUSHALL")
    store = Store(lambda: NOW)
    for command in commands:
        both(server, store, command)
    assert model_state(store) == real_state(server)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(commands=st.lists(GROUP_COMMANDS, max_size=25))
def test_groups_do_what_redis_does(server: redis.Redis, commands: list[tuple[Any, ...]]) -> None:
    """Who is given an entry, who may take it over, and what is refused."""
    server.execute_command("FLUSHALL")
    store = Store(lambda: NOW)
    for command in commands:
        both(server, store, command)
    assert model_state(store) == real_state(server)


R, GW, P, D, S = "{t}:req:r", "{t}:tokens:g", "p", "d", "{t}:sched"
WORDS = ("1", "2", "")
_SCRIPT_ARGS: dict[str, tuple[list[str], list[Any]]] = {
    "admit": (
        [R, "{t}:queued", S, "{t}:gateways", "{t}:open:g", "{t}:log:r:0", GW],
        ["r", b"\x00body", "g", 9, b"m1", "?", b""],
    ),
    "greet": (["{t}:gateways"], ["g", 5000]),
    "bury_gateway": (["{t}:gateways", "{t}:open:g"], ["g", FOREVER_MS]),
    "forget_gateway": (["{t}:gateways", "{t}:open:g", GW], ["g"]),
    "register": (["{t}:workers", "{t}:worker:d", S], ["d", b"reg", 9, 5000, b"m2"]),
    "heartbeat": (["{t}:workers", "{t}:worker:d"], ["d", 5000]),
    "retire": (["{t}:workers", "{t}:worker:d", S], ["d", "dead", b"m3"]),
    "bury": (["{t}:workers", "{t}:worker:d", "{t}:held:d"], ["d", FOREVER_MS]),
    "forget": (["{t}:workers", "{t}:worker:d", "{t}:held:d", "{t}:work:d", "{t}:control:d"], ["d"]),
    "clamp": (["{t}:workers"], [5000]),
    "lead": (["{t}:leader"], ["s"]),
    "dispatch": (
        [
            *(R, "{t}:queued", "{t}:leader", "{t}:worker:d", "{t}:held:d", "{t}:work:d"),
            *("{t}:worker:-", "{t}:held:-", "{t}:work:-"),
        ],
        ["r", "?", "a", "1", "d", 4, b"task", "-", b""],
    ),
    "accept": (
        [R, "{t}:leases", "{t}:held:-", "{t}:control:p"],
        ["r", "?", "a", "d", "decode", -10, b"m9", 600_000],
    ),
    "renew": (["{t}:leases", R], ["d", 2000, "r", "?", "a"]),
    "emit": ([GW, R, "{t}:log:r:0"], ["?", "a", 0, b"\x07\0\0\0\x08\0\0\0", b"m4"]),
    "complete": (
        [R, "{t}:leases", GW, S, "{t}:log:r:0", "{t}:worker:d", "{t}:held:d", "{t}:held:-", "{t}:open:g"],
        ["r", "?", "a", b"m5", b"m6", 60000],
    ),
    "cancel": (
        [
            *(R, "{t}:queued", "{t}:leases", GW, S, "{t}:log:r:0", "{t}:control:-", "{t}:control:d"),
            *("{t}:open:g", "{t}:held:-"),
        ],
        ["r", "?", "-", "d", b"m7", b"m8", b"m9", 60000, 600000],
    ),
    "cancel_choice": ([R, "{t}:control:d"], ["?", "d", b"m9", 600000]),
    "requeue": (
        [
            *(R, "{t}:queued", "{t}:leases", GW, S, "{t}:log:r:0", "{t}:control:-", "{t}:control:d"),
            *("{t}:held:-", "{t}:open:g"),
        ],
        ["r", "?", "-", "d", "d", 3, b"m10", b"m11", b"m12", b"m13", 60000, 600000, FOREVER_MS],
    ),
    "fail": ([R, "{t}:queued", GW, S, "{t}:log:r:0", "{t}:open:g"], ["r", "?", b"m14", b"m15", 60000]),
    "refund": (["{t}:worker:d", "{t}:held:d", S], ["r/?", "", b"m16"]),
}
LIKELY = ("greet", "register", "lead", "admit", "dispatch", "accept", "emit", "submit_open", "result_add")


SUB, RESULT, SUBMIT, DEAD = "{t}:sub:s", "{t}:result:s", "{t}:submit", "{t}:dead"
_SCRIPT_ARGS |= {
    "submit_open": ([SUB, SUBMIT, "{t}:replies:x"], ["g", "gateways", "?-1", "s", RESULT, 60000, "n?"]),
    "submit_renew": ([SUBMIT, SUB, RESULT], ["g", "gateways", 0, 60000, "?-1"]),
    "result_add": (
        [SUB, RESULT, "{t}:replies:x"],
        ["g", 60000, "s", "?-1", 0, 0, 2, 3, "[7,8]", "7 8", 0, 2, "?", 5, "[9]", " 9"],
    ),
    "submit_end": (
        [SUB, RESULT, SUBMIT, DEAD, "{t}:replies:x"],
        ["g", "gateways", "?-1", 60000, "s", 200, "result", b"{}", "why", 10000, "id", "s"],
    ),
    "submit_adopt": (
        [
            *(SUB, R, "{t}:queued", "{t}:leases", GW, S, "{t}:log:r:0", "{t}:control:-", "{t}:control:d"),
            *("{t}:held:-", "{t}:open:g", "{t}:open:g"),
        ],
        ["g", "r", "?", "-", "d", "g", b"body", b"m17", b"m18", "nonce?", 600000, "?-1"],
    ),
    "submit_retry": ([SUBMIT, DEAD, SUB, RESULT], ["1-1", "id", "s"]),
}
BEGIN = (
    ("XGROUP", "CREATE", SUBMIT, "gateways", "0", "MKSTREAM"),
    ("XADD", SUBMIT, "1-1", "id", "s"),
    ("XADD", SUBMIT, "2-1", "id", "s"),
)
OF_THE_EDGE = {"limit", "limit_leave", "limit_renew"}
"""No part of the simulated world: `test_limits.py`."""


def test_every_script_is_compared() -> None:
    """A new script needs its line here."""
    assert set(_SCRIPT_ARGS) == set(sources()) - OF_THE_EDGE


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    start=st.integers(0, len(LIKELY)),
    steps=st.lists(st.tuples(st.sampled_from(sorted(_SCRIPT_ARGS)), st.integers(1, 2)), max_size=14),
)
def test_every_script_does_on_the_model_what_it_does_on_redis(
    server: redis.Redis, start: int, steps: list[tuple[str, int]]
) -> None:
    """From any point of a request's life, any scripts in any order, at the right and at the wrong epoch."""
    server.execute_command("FLUSHALL")
    store = Store(lambda: NOW)
    for command in BEGIN:
        both(server, store, command)
    both(server, store, ("XREADGROUP", "GROUP", "gateways", "g", "COUNT", 1, "STREAMS", SUBMIT, ">"))
    for name, epoch in [(name, 1) for name in LIKELY[:start]] + steps:
        keys, args = _SCRIPT_ARGS[name]
        args = [arg.replace("?", str(epoch)) if isinstance(arg, str) else arg for arg in args]
        real = server.execute_command("EVAL", _PRELUDE + sources()[name], len(keys), *keys, *args)
        model = evaluate(store, sources()[name], keys, args)
        assert settled(model) == settled(real), name
    assert model_state(store) == real_state(server)


def test_time_and_expiry_are_virtual() -> None:
    """A key goes when the clock handed in says so."""
    now = [NOW]
    store = Store(lambda: now[0])
    store.run(b"SET", "k", "v")
    store.run(b"PEXPIRE", "k", 1500)
    now[0] += 1.4
    assert store.run(b"GET", "k") == b"v"
    now[0] += 0.2
    assert store.run(b"GET", "k") is None
    assert store.run(b"TIME") == [b"%d" % int(now[0]), b"%d" % (round(now[0] * 1e6) % 1_000_000)]


def test_ids_of_entries_grow_even_within_a_millisecond() -> None:
    """And a reader gets what came after its last id."""
    store = Store(lambda: NOW)
    first, second = (store.run(b"XADD", "s", "*", "m", str(i)) for i in range(2))
    assert first.endswith(b"-0")
    assert second.endswith(b"-1")
    assert store.streams.xread(10, {b"s": first}) == [[b"s", [[second, [b"m", b"1"]]]]]
    assert store.streams.xread(10, {b"s": second}) is None
    assert raw(7) == b"7"
