"""Loads `shared/lua/*.lua` and calls them by digest, with their keys declared.

A Redis that is full (`maxmemory`, noeviction) refuses a script's first write if that may take memory, but none after a
write that frees. So whatever carries work on or ends it begins with one, often of nothing: what was begun ends, and
memory comes back. What brings new work (`admit`, `submit_open`) does not, and is refused with `BusFull`.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

from shared.redis_link import RedisLink

Arg = str | bytes | int


@cache
def sources() -> dict[str, str]:
    """Text of every script, by name."""
    folder = Path(__file__).parent / "lua"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.lua"))}


@cache
def _digests() -> dict[str, str]:
    return {name: sha1(text.encode()).hexdigest() for name, text in sources().items()}


class Scripts:
    """All scripts of the Lua face. `run` is one atomic step in Redis."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._source, self._digest = sources(), _digests()

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """The script's answer.

        :raises BusError: Redis unreachable for too long, or the script failed.
        """
        client = self._link.client

        async def once() -> Any:
            try:
                return await client.evalsha(self._digest[name], len(keys), *keys, *args)
            except NoScriptError:  # a new or restarted Redis
                return await client.eval(self._source[name], len(keys), *keys, *args)

        return await self._link.call(once)
