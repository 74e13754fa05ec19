"""Questions to the prefix index. Its answers are hints: without one, a request is placed by load alone.

While the index is silent nobody waits for it: after a time-out, questions are sent about once a second as probes, and
the first answer, however late, restores trust.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import anyio
import structlog

from services.scheduler.wakeup import wait_for
from shared.bus import Bus, Delivery
from shared.clock import Clock
from shared.errors import BusError, BusFull
from shared.ids import BlockCount, BlockHash, Incarnation
from shared.keys import Keys
from shared.lazy_reader import LazyReader
from shared.messages import MatchQuery, MatchReply

log = structlog.get_logger(__name__)

PROBE_EVERY_S = 1.0

Hits = Mapping[Incarnation, BlockCount]
"""Leading blocks that a worker holds; absent = none known."""


@dataclass(slots=True)
class _Round:
    """Questions asked together; `answers[i]` grows as replies come, one per kind of pool."""

    answers: list[dict[Incarnation, BlockCount]]
    open: dict[int, int]  # query id -> position in answers
    done: anyio.Event = field(default_factory=anyio.Event)


class PrefixHints:
    """Asks the index and counts its silences."""

    def __init__(self, bus: Bus, keys: Keys, incarnation: Incarnation, clock: Clock, timeout_s: float) -> None:
        self._bus, self._keys, self._incarnation = bus, keys, incarnation
        self._clock, self._timeout_s = clock, timeout_s
        self._ids = count(1)
        self._round: _Round | None = None
        self._silent = False
        self._last_asked = float("-inf")
        self.num_asked = 0
        self.num_unanswered = 0

    async def ask(self, prompts: Sequence[Sequence[BlockHash]], fingerprints: Collection[str]) -> list[Hits]:
        """Hits of each prompt over all kinds of pools, aligned with `prompts`; empty where none are known in time.
        One call at a time."""
        assert self._round is None, "one round of questions at a time"
        asked = _Round([{} for _ in prompts], {})
        queries = []
        for position, hashes in enumerate(prompts):
            for fingerprint in fingerprints if hashes else ():
                query_id = next(self._ids)
                asked.open[query_id] = position
                queries.append(MatchQuery(query_id, self._incarnation, fingerprint, tuple(hashes)))
        if not queries or (self._silent and self._clock.now() - self._last_asked < PROBE_EVERY_S):
            return list(asked.answers)
        if self._silent:  # a probe; one at most lies there, as an index that is gone takes none away
            queries = queries[:1]
            asked.open = {queries[0].query_id: asked.open[queries[0].query_id]}
            if await self._bus.length(self._keys.index()):
                self._last_asked = self._clock.now()
                return list(asked.answers)
        self._last_asked = self._clock.now()
        self.num_asked += len(queries)
        self._round = asked
        try:
            await self._bus.publish(self._keys.index(), *queries)
            if not self._silent and not await wait_for(asked.done, self._clock, self._timeout_s):
                self._silent = True
                self.num_unanswered += len(asked.open)
                log.warning("index.silent", timeout_s=self._timeout_s, questions=len(queries))
        except BusFull:
            log.warning("hints.unasked", why="redis is full")
        finally:
            self._round = None
        return list(asked.answers)

    async def listen(self) -> None:
        """Take in answers, for ever."""
        reader = LazyReader(self._bus.reader(self._keys.reply(self._incarnation)), self._clock)
        while True:
            try:
                deliveries = await reader.next()
                self._take(deliveries)
                reader.ack(deliveries)
            except BusError as exc:
                log.warning("hints.paused", error=str(exc))
                await self._clock.sleep(PROBE_EVERY_S)

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        if self._silent and deliveries:
            log.info("index.answers_again")
            self._silent = False
        for delivery in deliveries:
            for reply in delivery.messages:
                self._take_one(reply)

    def _take_one(self, reply: MatchReply) -> None:
        asked = self._round
        position = asked.open.pop(reply.query_id, None) if asked else None
        if asked is None or position is None:
            return  # late
        asked.answers[position].update((Incarnation(i), BlockCount(n)) for i, n in reply.num_blocks.items())
        if not asked.open:
            asked.done.set()
