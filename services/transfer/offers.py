"""The source's ledger of what it offers. No socket, no task: time comes from the clock that is handed in.

The life of an offer:
open       the worker took the task; blocks are announced as they fill, the worker keeps them pinned
released   the reader needs them no more: it has all of them (answer `held`), or has given up
expired    no sign of the reader, and no `keep` by the worker, for the hold time
withdrawn  the worker itself ended it: cancelled, failed, shutting down
The last three are final and remembered for a while, so that a repeated question gets the same answer.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import anyio

from services.transfer.frames import MAX_READY_BLOCKS
from services.transfer.stats import SourceStats
from shared import capability
from shared.clock import Clock
from shared.ids import AttemptId, BlockDigest, BlockId, Incarnation, RequestId
from shared.messages import FirstToken, Gone, Ready, Refused, Release, ReleaseAnswer, SourceMsg, Want

Key = tuple[RequestId, int]
"""Request and epoch: what the messages of a transfer name."""
Outcome = Literal["released", "expired", "withdrawn"]

MAX_REMEMBERED = 4096
MAX_WAITING = 4096


class Sink(Protocol):
    """Where the messages of one connection go."""

    def post(self, message: SourceMsg) -> None:
        """Queue it, without waiting."""
        ...


class Offer:
    """The blocks of one request, as the worker fills them. Made by `open` alone.

    The worker may unpin the blocks only once `settled` has returned.
    """

    def __init__(self, book: "OfferBook", key: Key, attempt: AttemptId, reader: Incarnation) -> None:
        self.key, self.attempt, self.reader = key, attempt, reader
        self._book = book
        self._log: list[Ready] = []
        self._announced: set[BlockId] = set()
        self._next_block = 0
        self._complete = False
        self._sink: Sink | None = None
        self._last_sign = book.clock.now()
        self._outcome: Outcome | None = None
        self._reason = ""
        self._over = False
        self._done = anyio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the blocks are pinned still. Expires it first, if its time is over: so the answer is exact,
        however rarely the book is tended."""
        self.expire_if_due()
        return self._outcome is None

    def expire_if_due(self) -> None:
        if self._outcome is None and self._book.clock.now() > self._last_sign + self._book.hold_s:
            self.end("expired", "no sign of the reader")

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def announce(
        self,
        first_block: int,
        block_ids: Sequence[BlockId],
        digests: Sequence[BlockDigest],
        last: FirstToken | None = None,
    ) -> None:
        """Tell the reader that these blocks are filled and pinned. Nothing happens once the offer has ended.

        :param first_block: logical index of block_ids[0]; announcements come in order, without gaps.
        :param last: set on the final announcement, and on that only.
        """
        assert len(block_ids) == len(digests)
        if not self.is_open:
            return  # it counts nothing any more, so the order of what comes now is nobody's fault
        assert first_block == self._next_block, f"announced block {first_block}, expected {self._next_block}"
        assert not self._complete, "announced after the last"
        assert all(0 <= b < self._book.num_blocks for b in block_ids)
        self._next_block += len(block_ids)
        self._announced.update(block_ids)
        self._complete = last is not None
        starts = range(0, len(block_ids), MAX_READY_BLOCKS) or range(1)
        for start in starts:
            end = start + MAX_READY_BLOCKS
            message = Ready(
                request_id=self.key[0],
                epoch=self.key[1],
                first_block=first_block + start,
                block_ids=tuple(block_ids[start:end]),
                digests=tuple(digests[start:end]),
                last=last if end >= len(block_ids) else None,
            )
            self._log.append(message)
            self._post(message)

    def keep(self) -> None:
        """The worker holds the request's lease still: renew the hold, and show the reader that we live."""
        if self.is_open:
            self._last_sign = self._book.clock.now()
            self._post(heartbeat(self.key, self._next_block))

    def withdraw(self, reason: str, *, over: bool = False) -> None:
        """End it from this side. The reader is told. Nothing happens once the offer has ended.

        :param over: the attempt itself is over: the reader need not look for the blocks elsewhere.
        """
        if self.is_open:
            self._over = over
            self.end("withdrawn", reason)

    async def settled(self) -> Outcome:
        """Wait for the end. Only then may the blocks be unpinned."""
        await self._done.wait()
        assert self._outcome is not None
        return self._outcome

    # --- for the book and its connections ----------------------------------------------------------

    def attach(self, sink: Sink) -> None:
        """The reader (re)connected: tell it all that was announced so far."""
        self.touch()
        self._sink = sink
        for message in self._log:
            sink.post(message)

    def detach(self, sink: Sink) -> None:
        if self._sink is sink:
            self._sink = None

    def touch(self) -> None:
        """A sign of the reader."""
        self._last_sign = self._book.clock.now()

    def covers(self, block_ids: Sequence[BlockId]) -> bool:
        return self._announced.issuperset(block_ids)

    def end(self, outcome: Outcome, reason: str) -> None:
        """Settle it. The reader of one that it did not release itself is told at once."""
        assert self._outcome is None
        self._outcome, self._reason = outcome, reason
        self._book.remember_ended(self)
        self._log.clear()
        self._announced.clear()
        if outcome != "released":
            self._post(self.farewell())
        self._done.set()

    def farewell(self) -> SourceMsg:
        """What a reader is told that asks for an ended offer."""
        request_id, epoch = self.key
        if self._outcome == "withdrawn":
            return Gone(request_id=request_id, epoch=epoch, reason=self._reason, over=self._over)
        return ReleaseAnswer(request_id=request_id, epoch=epoch, answer="stale")

    def _post(self, message: SourceMsg) -> None:
        if self._sink is not None:
            self._sink.post(message)


def heartbeat(key: Key, next_block: int) -> Ready:
    """An announcement of nothing: it only shows the reader that the source lives."""
    return Ready(request_id=key[0], epoch=key[1], first_block=next_block, block_ids=(), digests=())


@dataclass(slots=True)
class _Waiting:
    """A `Want` that came before its offer: its worker has not read the task yet."""

    want: Want
    reader: Incarnation
    sink: Sink
    deadline: float


class OfferBook:
    """Owner of the offers, of the wants that wait for one, and of the memory of ended ones."""

    def __init__(
        self,
        clock: Clock,
        hold_s: float,
        incarnation: Incarnation,
        capability_key: bytes,
        num_blocks: int,
        stats: SourceStats,
    ) -> None:
        self.clock, self.hold_s, self.num_blocks = clock, hold_s, num_blocks
        self._incarnation, self._capability_key = incarnation, capability_key
        self._stats = stats
        self._open: dict[Key, Offer] = {}
        self._ended: OrderedDict[Key, Offer] = OrderedDict()
        self._waiting: dict[Key, _Waiting] = {}

    def open(self, request_id: RequestId, epoch: int, attempt: AttemptId, reader: Incarnation) -> Offer:
        """See `TransferSource.open`."""
        key = (request_id, epoch)
        assert key not in self._open, f"request {request_id} epoch {epoch} is offered already"
        self._ended.pop(key, None)
        offer = self._open[key] = Offer(self, key, attempt, reader)
        self._stats.open_offers = len(self._open)
        waiting = self._drop_waiting(key)
        if waiting is not None:
            self._attach(offer, waiting.want, waiting.reader, waiting.sink)
        return offer

    def want(self, want: Want, reader: Incarnation, sink: Sink) -> bool:
        """A reader asks for a request's announcements, now and from now on. Returns whether it was allowed to."""
        key = (want.request_id, want.epoch)
        names = (want.request_id, want.epoch, want.attempt, self._incarnation, reader)
        if not capability.verify(want.capability, self._capability_key, *names):
            self._refuse(want, sink, "capability does not fit")
            return False
        offer = self.find(key)
        if offer is not None:
            return self._attach(offer, want, reader, sink)
        if len(self._waiting) >= MAX_WAITING and key not in self._waiting:
            self._refuse(want, sink, "too many requests wait here")
            return False
        self._waiting[key] = _Waiting(want, reader, sink, self.clock.now() + self.hold_s)
        self._stats.waiting_wants = len(self._waiting)
        return True

    def release(self, release: Release, reader: Incarnation) -> ReleaseAnswer:
        """The reader needs the blocks no more. `held` if they were pinned all the time; repeatable."""
        key = (release.request_id, release.epoch)
        offer = self.find(key)
        held = False
        if offer is None:
            waiting = self._waiting.get(key)
            if waiting is not None and (waiting.want.attempt, waiting.reader) == (release.attempt, reader):
                self._drop_waiting(key)
        elif (offer.attempt, offer.reader) == (release.attempt, reader):
            if offer.is_open:
                offer.end("released", "")
            held = offer.outcome == "released"
        if not held:
            self._stats.stale += 1
        return ReleaseAnswer(request_id=key[0], epoch=key[1], answer="held" if held else "stale")

    def find(self, key: Key) -> Offer | None:
        """The offer, open or remembered."""
        return self._open.get(key) or self._ended.get(key)

    def tend(self) -> None:
        """Expire what is overdue."""
        for offer in list(self._open.values()):
            offer.expire_if_due()
        now = self.clock.now()
        for key, waiting in list(self._waiting.items()):
            if now > waiting.deadline:
                self._drop_waiting(key)
                waiting.sink.post(Gone(request_id=key[0], epoch=key[1], reason="never offered here"))

    def reassure(self) -> None:
        """Show the readers whose requests are not offered yet that this source lives."""
        for key, waiting in self._waiting.items():
            waiting.sink.post(heartbeat(key, 0))

    def disconnect(self, keys: set[Key], sink: Sink) -> None:
        """The connection has ended: nothing is sent to it any more."""
        for key in keys:
            offer = self._open.get(key)
            if offer is not None:
                offer.detach(sink)
            waiting = self._waiting.get(key)
            if waiting is not None and waiting.sink is sink:
                self._drop_waiting(key)

    def close(self, reason: str) -> None:
        for offer in list(self._open.values()):
            offer.withdraw(reason)

    def remember_ended(self, offer: Offer) -> None:
        """Called by the offer when it ends."""
        assert self._open.get(offer.key) is offer
        del self._open[offer.key]
        self._ended[offer.key] = offer
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._stats.open_offers = len(self._open)
        self._stats.released += offer.outcome == "released"
        self._stats.expired += offer.outcome == "expired"
        self._stats.withdrawn += offer.outcome == "withdrawn"

    def _attach(self, offer: Offer, want: Want, reader: Incarnation, sink: Sink) -> bool:
        if (offer.attempt, offer.reader) != (want.attempt, reader):
            self._refuse(want, sink, "offered to another attempt")
            return False
        if offer.is_open:
            offer.attach(sink)
        else:
            self.answer_ended(offer, sink)
        return True

    def answer_ended(self, offer: Offer, sink: Sink) -> None:
        message = offer.farewell()
        if isinstance(message, ReleaseAnswer):
            self._stats.stale += 1
        sink.post(message)

    def _refuse(self, want: Want, sink: Sink, reason: str) -> None:
        self._stats.refused += 1
        sink.post(Refused(reason=reason, request_id=want.request_id, epoch=want.epoch))

    def _drop_waiting(self, key: Key) -> _Waiting | None:
        waiting = self._waiting.pop(key, None)
        self._stats.waiting_wants = len(self._waiting)
        return waiting
