"""How long the shared streams are, and how full Redis is: what grows when a consumer is gone, and what it grows to."""

from collections.abc import Mapping
from typing import Any

from shared.redis_link import RedisLink


class StreamLengths:
    """Looks at a fixed set of streams. `lengths` and `memory` are as old as the last `look`."""

    def __init__(self, link: RedisLink, streams: Mapping[str, str]) -> None:
        """:param streams: name -> key."""
        self._link, self._streams = link, dict(streams)
        self.lengths: dict[str, int] = dict.fromkeys(self._streams, 0)
        self.memory = {"used_bytes": 0, "max_bytes": 0}  # max 0 = no limit

    async def look(self) -> None:
        """:raises BusError: Redis was away for too long."""
        *lengths, memory = await self._link.call(self._ask)
        self.lengths = dict(zip(self._streams, lengths, strict=True))
        self.memory = {"used_bytes": int(memory["used_memory"]), "max_bytes": int(memory["maxmemory"])}

    async def _ask(self) -> list[Any]:
        pipe = self._link.client.pipeline(transaction=False)
        for key in self._streams.values():
            pipe.xlen(key)
        pipe.info("memory")
        return await pipe.execute()
