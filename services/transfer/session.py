"""The source's end of one connection, without its socket: messages in, messages and reads out.

Every `Read` is answered by exactly one of: its bytes, or the ended offer's farewell. After the farewell no
bytes of that request follow.
"""

from collections import deque
from dataclasses import dataclass

import anyio

from services.transfer.frames import MAX_READ_BYTES
from services.transfer.offers import Key, Offer, OfferBook
from services.transfer.stats import SourceStats
from shared.errors import WireError
from shared.ids import BlockId, Incarnation
from shared.messages import (
    PROTOCOL_VERSION,
    Gone,
    Hello,
    HelloOk,
    Read,
    ReaderMsg,
    Refused,
    ReleaseAnswer,
    SourceMsg,
    Want,
)

MAX_QUEUED_READS = 256
MAX_ID_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """What both ends compare before anything else."""

    incarnation: Incarnation
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Sending:
    """A read whose turn has come. Its bytes may go out only while `offer.is_open`."""

    offer: Offer
    block_ids: tuple[BlockId, ...]


class Session:
    """Protocol state of one connection. Owner of its queues."""

    def __init__(self, book: OfferBook, identity: Identity, block_bytes: int, stats: SourceStats) -> None:
        self._book, self._identity, self._stats = book, identity, stats
        self._block_bytes = block_bytes
        self._reader: Incarnation | None = None
        self._wanted: set[Key] = set()
        self._control: deque[SourceMsg] = deque()
        self._reads: deque[Sending] = deque()
        self._changed = anyio.Event()
        self._room = anyio.Event()
        self.is_closing = False  # nothing is accepted any more; what is queued still goes out

    def hello(self, message: ReaderMsg) -> HelloOk | Refused:
        """Answer the first message. After a refusal the connection ends."""
        reason = self._misfit(message)
        if reason is not None:
            self._stats.refused += 1
            return Refused(reason=reason)
        assert isinstance(message, Hello)
        self._reader = message.reader
        return HelloOk(block_bytes=self._block_bytes, num_blocks=self._book.num_blocks)

    def _misfit(self, message: ReaderMsg) -> str | None:
        if not isinstance(message, Hello):
            return "expected a hello"
        if message.protocol != PROTOCOL_VERSION:
            return f"protocol {message.protocol}, this source speaks {PROTOCOL_VERSION}"
        if message.source != self._identity.incarnation:
            return "another incarnation lives here"
        if message.fingerprint != self._identity.fingerprint:
            return "pools do not fit"
        return None

    def handle(self, message: ReaderMsg) -> None:
        """One message after the hello.

        :raises WireError: a message that has no place here.
        """
        assert self._reader is not None
        if self.is_closing:
            return
        if isinstance(message, Hello):
            raise WireError("a second hello")
        if len(message.request_id) > MAX_ID_CHARS or not 0 <= message.epoch < 1 << 63:
            raise WireError("not the name of a request")
        if isinstance(message, Want):
            if self._book.want(message, self._reader, self):
                self._wanted.add((message.request_id, message.epoch))
        elif isinstance(message, Read):
            self._read(message)
        else:
            self.post(self._book.release(message, self._reader))

    def _read(self, message: Read) -> None:
        key = (message.request_id, message.epoch)
        offer = self._book.find(key)
        num_bytes = len(message.block_ids) * self._block_bytes
        if offer is None or (key not in self._wanted and offer.is_open):
            self._end_refused(message, "not wanted first")
        elif not message.block_ids or (len(message.block_ids) > 1 and num_bytes > MAX_READ_BYTES):
            self._end_refused(message, f"a read of {num_bytes} bytes")
        elif offer.is_open and not offer.covers(message.block_ids):
            self._end_refused(message, "not announced")
        else:
            offer.touch()
            self._stats.reads += 1
            self._reads.append(Sending(offer, message.block_ids))
            self._changed.set()

    def _end_refused(self, message: Read, reason: str) -> None:
        """A read that no honest reader sends: say so, then hang up."""
        self._stats.refused += 1
        self._reads.clear()
        self.post(Refused(reason=reason, request_id=message.request_id, epoch=message.epoch))
        self.is_closing = True

    def post(self, message: SourceMsg) -> None:
        self._control.append(message)
        self._changed.set()
        if isinstance(message, Gone | ReleaseAnswer):
            self._forget_ended((message.request_id, message.epoch))

    def _forget_ended(self, key: Key) -> None:
        offer = self._book.find(key)
        if offer is None or not offer.is_open:
            self._wanted.discard(key)

    def take(self) -> SourceMsg | Sending | None:
        """What to send next; control goes before bytes. None: nothing now."""
        while True:
            if self._control:
                return self._control.popleft()
            if not self._reads:
                return None
            sending = self._reads.popleft()
            self._room.set()
            if sending.offer.is_open:
                return sending
            self._book.answer_ended(sending.offer, self)

    async def room(self) -> None:
        """Wait until another read may be queued: so a greedy reader waits, and the queue stays short."""
        while len(self._reads) >= MAX_QUEUED_READS:
            self._room = anyio.Event()
            await self._room.wait()

    async def changed(self) -> None:
        """Wait until there may be something to take."""
        if not self._control and not self._reads:
            self._changed = anyio.Event()
            await self._changed.wait()

    def close(self) -> None:
        self._book.disconnect(self._wanted, self)
        self._wanted.clear()
        self._control.clear()
        self._reads.clear()
