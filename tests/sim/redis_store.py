"""A small Redis in memory: the commands that Baton's scripts and clients use, and no others.

Values and answers are what redis-py gives for them without decoding: bytes, ints, lists, None. `test_redis_model.py`
holds it equal to a real server. Time is a function handed in, so that TTLs and TIME are virtual.
"""

from collections.abc import Callable
from typing import Any

from tests.sim.redis_streams import Refused, StreamCommands

Arg = Any


class WrongType(Exception):
    """A command met a key of another kind: a bug of the caller."""


class Zset(dict[bytes, float]):
    """Member -> score."""

    def ordered(self) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in self.items())


def raw(value: Arg) -> bytes:
    """An argument as Redis sees it."""
    kind = type(value)
    if kind is bytes:
        return value
    if kind is str or isinstance(value, str):
        return value.encode()
    return b"%d" % value if kind is int else number(value)


def number(value: float) -> bytes:
    """As Lua's `%.17g`: whole numbers without a point, and a zero with its sign."""
    if value == 0 and str(value).startswith("-"):
        return b"-0"
    return b"%d" % value if value == int(value) else repr(value).encode()


class Store:
    """All keys. `run(name, *args)` is one command.

    :param now: seconds since the epoch.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.data: dict[bytes, Any] = {}
        self.deadlines: dict[bytes, float] = {}
        self.streams = StreamCommands(self)
        self.added: dict[bytes, None] = {}  # streams that grew since the owner last looked, in order
        self.commands: dict[bytes | str, Callable[..., Any]] = {}  # by name, to be called with bytes alone
        for owner in (self, self.streams):
            for method in [name for name in dir(owner) if name.startswith("_do_")]:
                name = method.removeprefix("_do_").upper()
                self.commands[name] = self.commands[name.encode()] = getattr(owner, method)

    def run(self, name: bytes | str, *args: Arg) -> Any:
        return self.commands[name](*[arg if type(arg) is bytes else raw(arg) for arg in args])

    # --- keys ---

    def get(self, key: bytes, kind: type | None = None) -> Any:
        """The live value, or None."""
        value = self.data.get(key)
        if value is None:
            return None
        if key in self.deadlines and self.deadlines[key] <= self._now():
            self.drop(key)
            return None
        if kind is not None and type(value) is not kind:
            raise WrongType(key)
        return value

    def drop(self, key: bytes) -> int:
        self.deadlines.pop(key, None)
        return self.data.pop(key, None) is not None

    def live_keys(self) -> list[bytes]:
        return [key for key in list(self.data) if self.get(key) is not None]

    def make(self, key: bytes, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            value = self.data[key] = kind()
        return value

    def _shrunk(self, key: bytes, value: Any) -> None:
        if not value:
            self.drop(key)

    def _do_exists(self, key: bytes) -> int:
        return int(self.get(key) is not None)

    def _do_del(self, *keys: bytes) -> int:
        return sum(self.drop(key) for key in keys if self.get(key) is not None)

    def _do_pexpire(self, key: bytes, ms: bytes) -> int:
        if self.get(key) is None:
            return 0
        self.deadlines[key] = self._now() + int(ms) / 1000
        return 1

    def _do_persist(self, key: bytes) -> int:
        return int(self.get(key) is not None and self.deadlines.pop(key, None) is not None)

    def _do_time(self) -> list[bytes]:
        micros = round(self._now() * 1e6)
        return [b"%d" % (micros // 1_000_000), b"%d" % (micros % 1_000_000)]

    def now_ms(self) -> int:
        return round(self._now() * 1e6) // 1000

    # --- strings ---

    def _do_get(self, key: bytes) -> bytes | None:
        return self.get(key, bytes)

    def _do_set(self, key: bytes, value: bytes) -> bytes:
        self.drop(key)
        self.data[key] = value
        return b"OK"

    def _do_setnx(self, key: bytes, value: bytes) -> int:
        if self.get(key) is not None:
            return 0
        self.data[key] = value
        return 1

    def _do_append(self, key: bytes, value: bytes) -> int:
        self.data[key] = (self.get(key, bytes) or b"") + value
        return len(self.data[key])

    def _do_strlen(self, key: bytes) -> int:
        return len(self.get(key, bytes) or b"")

    # --- hashes ---

    def _do_hget(self, key: bytes, field: bytes) -> bytes | None:
        value = self.get(key, dict)
        return None if value is None else value.get(field)

    def _do_hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        value = self.get(key, dict)
        return [None] * len(fields) if value is None else list(map(value.get, fields))

    def _do_hset(self, key: bytes, *pairs: bytes) -> int:
        value = self.make(key, dict)
        before = len(value)
        value.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(value) - before

    def _do_hdel(self, key: bytes, *fields: bytes) -> int:
        value = self.get(key, dict) or {}
        gone = sum(value.pop(field, None) is not None for field in fields)
        self._shrunk(key, value)
        return gone

    def _do_hkeys(self, key: bytes) -> list[bytes]:
        return list(self.get(key, dict) or {})

    def _do_hlen(self, key: bytes) -> int:
        return len(self.get(key, dict) or {})

    def _do_hgetall(self, key: bytes) -> list[bytes]:
        return [part for pair in (self.get(key, dict) or {}).items() for part in pair]

    def _do_hincrby(self, key: bytes, field: bytes, by: bytes) -> int:
        if by == b"-0":
            raise Refused("ERR value is not an integer or out of range")
        value = self.make(key, dict)
        value[field] = b"%d" % (int(value.get(field, b"0")) + int(by))
        return int(value[field])

    # --- sets ---

    def _do_sadd(self, key: bytes, *members: bytes) -> int:
        value = self.make(key, set)
        before = len(value)
        value.update(members)
        return len(value) - before

    def _do_srem(self, key: bytes, *members: bytes) -> int:
        value = self.get(key, set) or set()
        before = len(value)
        value.difference_update(members)
        self._shrunk(key, value)
        return before - len(value)

    def _do_smembers(self, key: bytes) -> list[bytes]:
        return sorted(self.get(key, set) or ())

    def _do_scard(self, key: bytes) -> int:
        return len(self.get(key, set) or ())

    def _do_sismember(self, key: bytes, member: bytes) -> int:
        return int(member in (self.get(key, set) or ()))

    # --- sorted sets ---

    def _do_zadd(self, key: bytes, *pairs: bytes) -> int:
        value = self.make(key, Zset)
        before = len(value)
        for score, member in zip(pairs[::2], pairs[1::2], strict=True):
            value[member] = float(score)
        return len(value) - before

    def _do_zrem(self, key: bytes, *members: bytes) -> int:
        value = self.get(key, Zset) or {}
        gone = sum(value.pop(member, None) is not None for member in members)
        self._shrunk(key, value)
        return gone

    def _do_zcard(self, key: bytes) -> int:
        return len(self.get(key, Zset) or ())

    def _do_zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = (self.get(key, Zset) or {}).get(member)
        return None if score is None else number(score)

    def _do_zrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[Any]:
        assert (first, last) == (b"0", b"-1"), "only whole ranges are modelled"
        pairs = (self.get(key, Zset) or Zset()).ordered()
        if options:
            return [part for score, member in pairs for part in (member, number(score))]
        return [member for _, member in pairs]

    def _do_zrangebyscore(self, key: bytes, low: bytes, high: bytes) -> list[bytes]:
        assert low == b"-inf"
        return [member for score, member in (self.get(key, Zset) or Zset()).ordered() if score <= float(high)]
