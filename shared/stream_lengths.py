"""How long the shared streams are: what bounds Redis' memory, and what grows when a consumer is gone."""

from collections.abc import Mapping

from shared.redis_link import RedisLink


class StreamLengths:
    """Looks at a fixed set of streams. `lengths` is as old as the last `look`."""

    def __init__(self, link: RedisLink, streams: Mapping[str, str]) -> None:
        """:param streams: name -> key."""
        self._link, self._streams = link, dict(streams)
        self.lengths: dict[str, int] = dict.fromkeys(self._streams, 0)

    async def look(self) -> None:
        """:raises BusError: Redis was away for too long."""
        self.lengths = dict(zip(self._streams, await self._link.call(self._ask), strict=True))

    async def _ask(self) -> list[int]:
        pipe = self._link.client.pipeline(transaction=False)
        for key in self._streams.values():
            pipe.xlen(key)
        return await pipe.execute()
