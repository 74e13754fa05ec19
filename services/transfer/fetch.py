"""One request's blocks, from a source into our region. The life of a fetch:

asking     `Want` is out; announcements come as the source's prefill goes on
reading    announced blocks are read, a few megabytes at a time, and verified
releasing  all is read; `held` makes it good, `stale` voids it
If the link is lost it starts again once, on a new link, with what is still missing.

However it ends, no byte moves into the destination blocks any more.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.transfer.frames import MAX_READ_BYTES, MAX_READY_BLOCKS
from services.transfer.landing import ByteBudget, Inbox, Piece, Ticket
from services.transfer.links import Link, start_read
from services.transfer.offers import Key
from services.transfer.region import Region
from services.transfer.stats import ReaderStats
from services.transfer.wire import LinkLost
from shared.errors import DigestMismatch, TransferError, TransferOver, TransferRefused, TransferStale
from shared.ids import AttemptId, BlockDigest, BlockId
from shared.messages import FirstToken, Gone, Ready, Refused, Release, ReleaseAnswer, SourceMsg, Want
from shared.offload import Offload

READ_AHEAD = 2  # reads of one fetch under way: the wire is busy while the last one is verified
MAX_LINKS = 2  # one, and one more after a loss


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of a fetch that ended in `held`. Every block read was verified."""

    first: FirstToken
    num_blocks_read: int
    num_bytes: int


class _Plan:
    """Which blocks are known, under way and here. Owner of that; moves nothing itself."""

    def __init__(self, dest: Sequence[BlockId | None]) -> None:
        self._dest = dest
        self._num_missing = sum(block is not None for block in dest)
        self._known: dict[int, tuple[BlockId, BlockDigest]] = {}
        self._todo: deque[Piece] = deque()
        self._listed: set[int] = set()  # on the list or under way, over this link
        self._here: set[int] = set()
        self._tried: set[int] = set()  # read again once already
        self.first: FirstToken | None = None

    @property
    def is_complete(self) -> bool:
        return self.first is not None and len(self._here) == self._num_missing

    def announce(self, ready: Ready, num_source_blocks: int) -> None:
        """Take in an announcement and put its blocks on the list, unless they are skipped or here already.
        A repeated one changes nothing.

        :raises TransferError: it contradicts an earlier one or our request, or leaves blocks out at the end.
        """
        if ready.first_block < 0 or len(ready.block_ids) != len(ready.digests):
            raise TransferError("malformed announcement")
        for index, block in enumerate(zip(ready.block_ids, ready.digests, strict=True), start=ready.first_block):
            if index >= len(self._dest) or not 0 <= block[0] < num_source_blocks:
                raise TransferError(f"source announces block {index} as {block[0]}, which cannot be")
            if self._known.setdefault(index, block) != block:
                raise TransferError(f"source announces block {index} twice, differently")
            self._schedule(index, *block)
        if ready.last is not None:
            if len(self._known) != len(self._dest):
                raise TransferError(f"source announced {len(self._known)} blocks of {len(self._dest)}")
            self.first = ready.last

    def begin_link(self) -> None:
        """Nothing is under way any more: plan what is known and not here. Announcements come again."""
        self._todo.clear()
        self._known.clear()
        self._listed.clear()

    def _schedule(self, index: int, source: BlockId, digest: BlockDigest) -> None:
        dest = self._dest[index]
        if dest is not None and index not in self._here and index not in self._listed:
            self._listed.add(index)
            self._todo.append(Piece(index, source, dest, digest))

    def next_pieces(self, max_pieces: int) -> tuple[Piece, ...]:
        """What the next read would take. Empty: nothing to do now."""
        return tuple(self._todo[i] for i in range(min(max_pieces, len(self._todo))))

    def started(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            assert self._todo.popleft() is piece

    def settled(self, pieces: tuple[Piece, ...], bad: list[Piece]) -> None:
        """A read has landed; the bad ones are read once more.

        :raises DigestMismatch: a block was bad twice.
        """
        self._here.update(piece.index for piece in pieces)
        for piece in bad:
            self._here.discard(piece.index)
            if piece.index in self._tried:
                raise DigestMismatch(f"block {piece.index} has other bytes than announced, twice")
            self._tried.add(piece.index)
            self._todo.appendleft(piece)

    @property
    def num_here(self) -> int:
        return len(self._here)


class Fetch:
    """Runs one fetch. Owner of its tickets, inbox and plan.

    :param get_link: a live link to the source, shared with others.
    """

    def __init__(
        self,
        key: Key,
        attempt: AttemptId,
        capability: bytes,
        dest: Sequence[BlockId | None],
        *,
        region: Region,
        inbox: Inbox,
        budget: ByteBudget,
        offload: Offload,
        stats: ReaderStats,
        get_link: Callable[[], Awaitable[Link]],
    ) -> None:
        self._key, self._attempt, self._capability = key, attempt, capability
        self._region, self.inbox, self._budget = region, inbox, budget
        self._offload, self._stats, self._get_link = offload, stats, get_link
        self._plan = _Plan(dest)
        self._tickets: deque[Ticket] = deque()
        most = min(MAX_READ_BYTES, budget.clamp(MAX_READ_BYTES)) // region.block_bytes
        self._max_pieces = min(max(1, most), MAX_READY_BLOCKS)

    async def run(self) -> Fetched:
        """:raises TransferError: or one of its kinds; see `TransferReader.fetch`."""
        for num_left in reversed(range(MAX_LINKS)):
            try:
                return await self._over(await self._get_own_link())
            except LinkLost:
                if not num_left:
                    raise
                self._stats.retries += 1
        raise AssertionError("unreachable")

    async def _get_own_link(self) -> Link:
        self.inbox.is_parked = True  # dialling has a time limit of its own
        try:
            return await self._get_link()
        finally:
            self.inbox.reset()
            self.inbox.is_parked = False

    async def _over(self, link: Link) -> Fetched:
        """All that is missing, over this link."""
        request_id, epoch = self._key
        link.routes.attach(self._key, self.inbox)
        ended = False
        try:
            if not self._plan.is_complete:
                self._plan.begin_link()
                link.post(Want(request_id=request_id, epoch=epoch, attempt=self._attempt, capability=self._capability))
                await self._land(link)
            await self._release(link)
            ended = True
        except (TransferStale, TransferRefused, LinkLost):
            ended = True
            raise
        finally:
            if not ended:  # cancelled or failed: the source need not hold the blocks for us
                link.post(self._release_message())
            self._abandon_tickets()
            link.routes.detach(self._key)
        assert self._plan.first is not None
        num_blocks = self._plan.num_here
        return Fetched(self._plan.first, num_blocks, num_blocks * self._region.block_bytes)

    async def _land(self, link: Link) -> None:
        """Read and verify until nothing is missing."""
        while not self._plan.is_complete:
            while (message := self.inbox.take()) is not None:
                self._hear(message, link)
            await self._start_reads(link)
            if self._tickets and self._tickets[0].landed:
                await self._settle(self._tickets[0])
            elif not self._plan.is_complete:
                await self.inbox.changed()

    def _hear(self, message: SourceMsg, link: Link) -> None:
        if isinstance(message, Ready):
            self._plan.announce(message, link.num_blocks)
        elif isinstance(message, ReleaseAnswer) and message.answer == "held":
            pass  # to a release of an earlier fetch of this request
        else:
            self._raise_ended(message)

    def _raise_ended(self, message: SourceMsg) -> None:
        request_id, epoch = self._key
        if isinstance(message, ReleaseAnswer):
            raise TransferStale(f"request {request_id} epoch {epoch}: the source does not hold the blocks any more")
        assert isinstance(message, Gone | Refused)
        if isinstance(message, Gone) and message.over:
            raise TransferOver(f"request {request_id} epoch {epoch} is over: {message.reason}")
        said = "withdrew" if isinstance(message, Gone) else "refuses"
        raise TransferRefused(f"request {request_id} epoch {epoch}: source {said}: {message.reason}")

    async def _start_reads(self, link: Link) -> None:
        """Keep reads under way, within the budget. Waits for budget only while it holds none of it."""
        while len(self._tickets) < READ_AHEAD:
            pieces = self._plan.next_pieces(self._max_pieces)
            if not pieces:
                return
            num_bytes = len(pieces) * self._region.block_bytes
            if not self._budget.try_take(num_bytes):
                if self._tickets:
                    return
                await self._wait_for_budget(num_bytes)
            self._plan.started(pieces)
            ticket = Ticket(pieces, self._region, self.inbox, link.mapped)
            self._tickets.append(ticket)
            self._stats.reads += 1
            start_read(link, self._key, ticket)

    async def _wait_for_budget(self, num_bytes: int) -> None:
        self.inbox.is_parked = True
        try:
            await self._budget.take(num_bytes)
        finally:
            self.inbox.is_parked = False
            self.inbox.touch()

    async def _settle(self, ticket: Ticket) -> None:
        """Copy, if that is ours to do, and verify, off the loop."""
        assert self._tickets[0] is ticket
        self.inbox.is_parked = True
        try:
            bad = await self._offload.run(ticket.settle)
        finally:
            self.inbox.is_parked = False
            self.inbox.touch()
        self._tickets.popleft()
        self._budget.give(ticket.num_bytes)
        self._stats.blocks_read += len(ticket.pieces)
        self._stats.bytes_read += ticket.num_received
        self._stats.digest_failures += len(bad)
        self._stats.retries += len(bad)
        self._plan.settled(ticket.pieces, bad)

    async def _release(self, link: Link) -> None:
        link.post(self._release_message())
        while True:
            message = self.inbox.take()
            if message is None:
                await self.inbox.changed()
            elif isinstance(message, ReleaseAnswer) and message.answer == "held":
                return
            elif not isinstance(message, Ready):
                self._raise_ended(message)

    def _release_message(self) -> Release:
        return Release(request_id=self._key[0], epoch=self._key[1], attempt=self._attempt)

    def _abandon_tickets(self) -> None:
        while self._tickets:
            ticket = self._tickets.popleft()
            ticket.abandon()
            self._budget.give(ticket.num_bytes)
