"""Runs the real scripts of `shared/lua` on the store: Lua 5.1, as in Redis, one function per text."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from lupa import lua51

from tests.sim.redis_store import Store, raw

_lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=False)
_table = _lua.table_from
_pack = msgspec.msgpack.Encoder().encode


_commands: dict[bytes | str, Any] = {}
"""Where `redis.call` goes just now: scripts run one at a time."""


def _call(name: bytes, *args: Any) -> Any:
    answer = _commands[name](*[arg if type(arg) is bytes else raw(arg) for arg in args])
    if answer is None:
        return False
    if type(answer) is list:
        return _table([False if item is None else item for item in answer])
    return answer


def _cmsgpack(table: Any) -> bytes:
    return _pack(_plain(table))


def _plain(table: Any) -> list[Any]:
    items = [table[i] for i in range(1, len(table) + 1)]
    return [i.decode() if isinstance(i, bytes) else int(i) if isinstance(i, int | float) else _plain(i) for i in items]


_redis = _table({b"call": _call})
_msgpack = _table({b"pack": _cmsgpack})


@cache
def _compiled(text: str) -> Any:
    source = f"return function(redis, cmsgpack) return function(KEYS, ARGV) {text}\nend end"
    return _lua.execute(source.encode())(_redis, _msgpack)


def evaluate(store: Store, text: str, keys: Sequence[Any], args: Sequence[Any]) -> Any:
    """The script's answer, as redis-py gives it."""
    global _commands
    _commands = store.commands
    return _answer(_compiled(text)(_table(list(map(raw, keys))), _table(list(map(raw, args)))))


def _answer(value: Any) -> Any:
    kind = type(value)
    if kind is bytes or kind is int:
        return value
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if kind is float:
        return int(value)
    return [_answer(value[i]) for i in range(1, len(value) + 1)]
