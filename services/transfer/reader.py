"""The taking end: pulls a request's blocks from another worker's source into our region."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.abc import TaskGroup, TaskStatus

from services.transfer.fetch import Fetch, Fetched
from services.transfer.landing import ByteBudget, Inbox
from services.transfer.links import Dialer, Link
from services.transfer.offers import Key
from services.transfer.region import Region
from services.transfer.stats import ReaderStats
from shared.clock import Clock
from shared.config import TransferConfig
from shared.errors import TransferError, TransferRefused, TransferStale
from shared.ids import AttemptId, BlockId, Incarnation, RequestId
from shared.messages import SourceRef
from shared.offload import Offload


@dataclass(slots=True)
class _Place:
    """The one link to a source, and who is dialling it."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    link: Link | None = None
    num_asking: int = 0


class _LinkPool:
    """Owner of the links: one per source incarnation, made when first needed, gone when lost."""

    def __init__(self, dialer: Dialer, tg: TaskGroup) -> None:
        self._dialer, self._tg = dialer, tg
        self._places: dict[Incarnation, _Place] = {}
        self._is_closed = False

    async def get(self, source: SourceRef) -> Link:
        place = self._places.setdefault(source.incarnation, _Place())
        place.num_asking += 1
        try:
            async with place.lock:
                if place.link is None or place.link.routes.lost is not None:
                    self._check_open()
                    link = await self._dialer.dial(source)
                    try:
                        self._check_open()
                    except TransferError:
                        link.close()
                        raise
                    place.link = link
                    self._tg.start_soon(self._run, source.incarnation, place, link)
                return place.link
        finally:
            place.num_asking -= 1
            self._tidy(source.incarnation, place)

    def close(self) -> None:
        """No new links from here on; the task group ends those that run."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError("the reader is shut down")

    async def _run(self, incarnation: Incarnation, place: _Place, link: Link) -> None:
        await link.run()
        if place.link is link:
            place.link = None
        self._tidy(incarnation, place)

    def _tidy(self, incarnation: Incarnation, place: _Place) -> None:
        if place.link is None and not place.num_asking and self._places.get(incarnation) is place:
            del self._places[incarnation]


class TransferReader:
    """Fetches into `region`. Runs inside `serve`; `fetch` may be called from any task meanwhile.

    :param stats: shared with the dialer, which counts the links.
    :param offload: where copies and digests run; two lanes are enough.
    """

    def __init__(
        self, region: Region, config: TransferConfig, clock: Clock, offload: Offload, dialer: Dialer, stats: ReaderStats
    ) -> None:
        assert stats.block_bytes == region.block_bytes
        self._region, self._config, self._clock = region, config, clock
        self._offload, self._dialer, self._stats = offload, dialer, stats
        self._budget = ByteBudget(config.max_inflight_bytes)
        self._fetches: dict[Key, Fetch] = {}
        self._links: _LinkPool | None = None

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep links and watch for silence until cancelled; then every fetch under way fails."""
        async with anyio.create_task_group() as tg:
            links = self._links = _LinkPool(self._dialer, tg)
            try:
                task_status.started()
                await self._watch()
            finally:
                links.close()

    async def fetch(
        self,
        source: SourceRef,
        request_id: RequestId,
        epoch: int,
        attempt: AttemptId,
        dest: Sequence[BlockId | None],
    ) -> Fetched:
        """Pull the request's blocks, as the source fills them.

        Returned, raised or cancelled: no byte moves into the destination any more. Only a return means that
        the bytes are good; otherwise the source is told, as far as it can be reached, that it need not hold them.

        :param dest: [num logical blocks] where each goes; None = it is here already and is not read.
        :raises TransferOver: the attempt is over at the source, nothing is to be done.
        :raises TransferRefused: capability, pools or incarnation do not fit, or the source withdrew.
        :raises TransferStale: the source did not hold the blocks until the end.
        :raises DigestMismatch: a block had wrong bytes, twice.
        :raises TransferError: the source cannot be reached, was lost twice, or fell silent.
        """
        key = (request_id, epoch)
        wanted = [block for block in dest if block is not None]
        assert key not in self._fetches, f"request {request_id} epoch {epoch} is being fetched already"
        assert len(set(wanted)) == len(wanted)
        assert all(0 <= block < self._region.num_blocks for block in wanted)
        fetch = self._fetches[key] = Fetch(
            key,
            attempt,
            source.capability,
            dest,
            region=self._region,
            inbox=Inbox(self._clock),
            budget=self._budget,
            offload=self._offload,
            stats=self._stats,
            get_link=partial(self._get_link, source),
        )
        self._stats.open_fetches += 1
        try:
            fetched = await fetch.run()
        except TransferError as exc:
            self._count_failure(exc)
            raise
        finally:
            del self._fetches[key]
            self._stats.open_fetches -= 1
        self._stats.fetched += 1
        return fetched

    def stats(self) -> ReaderStats:
        return self._stats.snapshot()

    async def _get_link(self, source: SourceRef) -> Link:
        assert self._links is not None, "fetch needs a reader that serves"
        return await self._links.get(source)

    def _count_failure(self, exc: TransferError) -> None:
        self._stats.failed += 1
        self._stats.refused += isinstance(exc, TransferRefused)
        self._stats.stale += isinstance(exc, TransferStale)

    async def _watch(self) -> None:
        """Fail the fetches that have heard nothing for too long."""
        limit_s = self._config.idle_timeout_s
        while True:
            await self._clock.sleep(min(limit_s, 10.0) / 10)
            for fetch in list(self._fetches.values()):
                inbox = fetch.inbox
                if not inbox.is_parked and self._clock.now() - inbox.last_sign > limit_s:
                    self._stats.timeouts += 1
                    inbox.fail(TransferError(f"nothing came for {limit_s:g} s"))
