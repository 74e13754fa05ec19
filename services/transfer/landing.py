"""Where a reader's blocks land. A ticket is one read under way; giving it up is a flag that the receiver looks
at before each byte, so whoever gave up may reuse the destination at once."""

from collections import deque
from dataclasses import dataclass, field

import anyio
import numpy as np

from services.transfer.offers import Key
from services.transfer.region import Region
from services.transfer.wire import MAX_VIEWS, LinkLost
from shared.clock import Clock
from shared.hashing import block_digest
from shared.ids import BlockDigest, BlockId
from shared.messages import Gone, Ready, Refused, ReleaseAnswer, SourceMsg


@dataclass(frozen=True, slots=True)
class Piece:
    """One block to move: logical index in the request, id there, id here, digest of the bytes."""

    index: int
    source: BlockId
    dest: BlockId
    digest: BlockDigest


class Inbox:
    """What a fetch waits on: messages of its request, fallen tickets, faults. One task waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._messages: deque[SourceMsg] = deque()
        self._fault: Exception | None = None
        self._changed = anyio.Event()
        self.last_sign = clock.now()
        self.is_parked = False  # waiting for something of our own, not for the source

    def reset(self) -> None:
        """Begin anew, on another link."""
        self._messages.clear()
        self._fault = None
        self.touch()

    def touch(self) -> None:
        self.last_sign = self._clock.now()

    def post(self, message: SourceMsg) -> None:
        self._messages.append(message)
        self.notify()

    def fail(self, fault: Exception) -> None:
        """Raised by the next `take`, after the messages that came before it."""
        self._fault = self._fault or fault
        self.notify()

    def notify(self) -> None:
        self.touch()
        self._changed.set()

    def take(self) -> SourceMsg | None:
        """The next message, None if there is none.

        :raises LinkLost, TransferError: what `fail` was given.
        """
        if self._messages:
            return self._messages.popleft()
        if self._fault is not None:
            raise self._fault
        self._changed = anyio.Event()
        return None

    async def changed(self) -> None:
        """Wait until something came since `take` returned None."""
        await self._changed.wait()


@dataclass(slots=True)
class Ticket:
    """One read under way, into the destination blocks of its pieces. Owner of the right to write there."""

    pieces: tuple[Piece, ...]
    region: Region
    inbox: Inbox
    mapped: np.ndarray | None = None  # the source's blocks, if we copy them ourselves
    num_received: int = 0
    landed: bool = False
    abandoned: bool = False
    _views: list[memoryview] = field(init=False)

    def __post_init__(self) -> None:
        self._views = [self.region.block(piece.dest) for piece in self.pieces]
        self.landed = self.mapped is not None

    @property
    def num_bytes(self) -> int:
        return len(self.pieces) * self.region.block_bytes

    def views(self) -> list[memoryview]:
        """Where the next bytes go, a few blocks at most. Valid until the next await only."""
        assert not self.abandoned
        first, offset = divmod(self.num_received, self.region.block_bytes)
        views = self._views[first : first + MAX_VIEWS]
        if offset:
            views[0] = views[0][offset:]
        return views

    def received(self, num_bytes: int) -> None:
        self.num_received += num_bytes
        assert self.num_received <= self.num_bytes
        self.inbox.touch()
        if self.num_received == self.num_bytes:
            self.landed = True
            self.inbox.notify()

    def abandon(self) -> None:
        """No byte is written any more. Idempotent."""
        self.abandoned = True

    def settle(self) -> list[Piece]:
        """Copy what is ours to copy, verify all. Returns the pieces whose digest is wrong.

        Slow: runs off the event loop. Releases the GIL while it copies.
        """
        assert self.landed
        bad = []
        for piece, view in zip(self.pieces, self._views, strict=True):
            if self.mapped is not None:
                np.copyto(np.frombuffer(view, dtype=np.uint8), self.mapped[piece.source])
                self.num_received += len(view)
            if block_digest(view) != piece.digest:
                bad.append(piece)
        assert self.num_received == self.num_bytes
        return bad


class Routes:
    """Who gets what comes in on one link. Owner of its inboxes and of the tickets that its reads fill."""

    def __init__(self) -> None:
        self._inboxes: dict[Key, Inbox] = {}
        self._tickets: dict[Key, deque[Ticket]] = {}
        self.lost: LinkLost | None = None

    def attach(self, key: Key, inbox: Inbox) -> None:
        assert key not in self._inboxes
        self._inboxes[key] = inbox
        if self.lost is not None:
            inbox.fail(self.lost)

    def detach(self, key: Key) -> None:
        del self._inboxes[key]

    def expect(self, key: Key, ticket: Ticket) -> None:
        """A `Read` goes out whose bytes belong into this ticket; they come in the order of the reads."""
        self._tickets.setdefault(key, deque()).append(ticket)

    def next_ticket(self, key: Key, num_bytes: int) -> Ticket:
        """The ticket that the announced bytes belong to.

        :raises LinkLost: nobody asked for them: the peer and we disagree, and only a new link helps.
        """
        waiting = self._tickets.get(key)
        if not waiting or waiting[0].num_bytes != num_bytes:
            raise LinkLost(f"{num_bytes} bytes that nobody asked for")
        ticket = waiting.popleft()
        if not waiting:
            del self._tickets[key]
        return ticket

    def dispatch(self, message: Ready | Gone | Refused | ReleaseAnswer) -> None:
        key = (message.request_id, message.epoch)
        if not isinstance(message, Ready):
            # The source sends no bytes of this request after such a message, whatever was asked for.
            for ticket in self._tickets.pop(key, ()):
                ticket.abandon()
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.post(message)

    def lose(self, reason: LinkLost) -> None:
        """The link has ended: nothing lands any more, everybody is told. Idempotent."""
        if self.lost is not None:
            return
        self.lost = reason
        for waiting in self._tickets.values():
            for ticket in waiting:
                ticket.abandon()
        self._tickets.clear()
        for inbox in self._inboxes.values():
            inbox.fail(reason)


class ByteBudget:
    """Bounds the bytes under way over all fetches of a reader. First come, first served."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes > 0
        self._max_bytes, self._free = max_bytes, max_bytes
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    @property
    def in_use(self) -> int:
        return self._max_bytes - self._free

    def clamp(self, num_bytes: int) -> int:
        """What a read of this size takes: one that is larger than the whole budget goes alone."""
        return min(num_bytes, self._max_bytes)

    def try_take(self, num_bytes: int) -> bool:
        """Take it now, or change nothing."""
        num_bytes = self.clamp(num_bytes)
        if self._waiting or num_bytes > self._free:
            return False
        self._free -= num_bytes
        return True

    async def take(self, num_bytes: int) -> None:
        """Take it, wait if need be. Whoever waits must hold none."""
        if self.try_take(num_bytes):
            return  # no await: a cancellation here would lose what was taken
        entry = (self.clamp(num_bytes), anyio.Event())
        self._waiting.append(entry)
        try:
            await entry[1].wait()
        except BaseException:
            if entry[1].is_set():
                self._free += entry[0]
            else:
                self._waiting.remove(entry)
            self._grant()
            raise

    def give(self, num_bytes: int) -> None:
        self._free += self.clamp(num_bytes)
        assert self._free <= self._max_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            num_bytes, event = self._waiting.popleft()
            self._free -= num_bytes
            event.set()
