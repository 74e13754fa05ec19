"""Loads `shared/lua/*.lua` and calls them by digest, with their keys declared."""

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
