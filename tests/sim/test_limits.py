"""Rate limits: the scripts on a real Redis and on the one in memory against a model in Python, at any time."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.scripts import sources
from tests.redis_server import RedisServer
from tests.sim.limits import Limits
from tests.sim.lua import evaluate
from tests.sim.redis_store import Store

START_MS = 1_700_000_000_250
KEYS = ("{t}:rate:k", "{t}:busy:k")
_PRELUDE = """
local real = redis
local redis = setmetatable({call = function(name, ...)
  if name == 'TIME' then return {'%d', '%d'} end
  return real.call(name, ...)
end}, {__index = real})
"""

name = st.sampled_from(("a", "b", "c"))
STEPS = st.one_of(
    st.tuples(st.just("enter"), name),
    st.tuples(st.just("charge"), name, st.integers(0, 130)),
    st.tuples(st.just("leave"), name, st.sampled_from((-1, 0, 7, 60))),
    st.tuples(st.just("renew"), name, name),
    st.tuples(st.just("wait"), st.sampled_from((1, 999, 7_000, 31_000, 70_000))),
    st.tuples(st.just("wait"), st.sampled_from((-1, -5_000))),
)


@pytest.fixture(scope="module")
def server(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url, protocol=2) as client:
        yield client


def script_of(limits: Limits, step: tuple[Any, ...]) -> tuple[str, list[Any]]:
    """The script that the step is, and its arguments."""
    kind, *rest = step
    sizes = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent, limits.hold_ms)
    match kind:
        case "enter":
            return "limit", ["enter", *sizes, 0, rest[0]]
        case "charge":
            return "limit", ["charge", *sizes, rest[1], rest[0]]
        case "leave":
            return "limit_leave", [rest[0], limits.tokens_per_minute, rest[1]]
    return "limit_renew", [limits.hold_ms, *rest]


def expected(limits: Limits, step: tuple[Any, ...]) -> Any:
    return getattr(limits, step[0])(*step[1:])


def on_redis(server: redis.Redis, now_ms: int, script: str, args: list[Any]) -> Any:
    text = _PRELUDE % divmod(now_ms * 1000, 1_000_000) + sources()[script]
    return server.execute_command("EVAL", text, len(KEYS), *KEYS, *args)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=st.sampled_from((0, 3, 60)),
    tokens=st.sampled_from((0, 100)),
    concurrent=st.sampled_from((0, 2)),
    steps=st.lists(STEPS, max_size=16),
)
def test_limits_are_those_of_the_model(
    server: redis.Redis, requests: int, tokens: int, concurrent: int, steps: list[tuple[Any, ...]]
) -> None:
    """Every answer, whatever comes before it; and the same on both Redis."""
    server.execute_command("FLUSHALL")
    limits = Limits(requests, tokens, concurrent, 30_000, START_MS)
    store = Store(lambda: START_MS / 1000)  # keys stay, as in the real one, for which no time passes
    store.commands[b"TIME"] = lambda: [b"%d" % part for part in divmod(limits.now_ms * 1000, 1_000_000)]
    for step in steps:
        if step[0] == "wait":
            limits.now_ms += step[1]
            continue
        script, args = script_of(limits, step)
        real = on_redis(server, limits.now_ms, script, args)
        assert evaluate(store, sources()[script], KEYS, args) == real, step
        assert real == expected(limits, step), step


def test_what_is_short_is_named_and_comes_back() -> None:
    """The model itself, by hand: three requests a minute, of which the fourth waits twenty seconds."""
    limits = Limits(3, 100, 0, 30_000, START_MS)
    assert [limits.enter(one)[0] for one in "abc"] == [1, 1, 1]
    assert limits.enter("d")[:3] == [0, b"r", 20_000]
    limits.now_ms += 20_000
    assert limits.enter("d")[:3] == [1, b"", 0]
    assert limits.charge("d", 101)[:3] == [0, b"t", -1]
    assert limits.charge("d", 60)[:5] == [1, b"", 0, 0, 40]
    assert limits.leave("d", 10) == 1
    assert limits.leave("d", 10) == 0
    assert limits.charge("a", 90)[:5] == [1, b"", 0, 0, 0]
