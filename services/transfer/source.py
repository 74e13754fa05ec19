"""The giving end: what a worker offers, behind a door that readers come through.

Example, inside a worker's task group:

    source = TransferSource(region, identity, capability_key, settings.transfer, clock, SocketDoor(...))
    await tg.start(source.serve)                    # the port is open
    offer = source.open(request_id, epoch, attempt, reader)
    offer.announce(0, block_ids, digests)           # after each chunk
    offer.announce(2, more_ids, more_digests, last=FirstToken(index=0, token_id=7))
    await offer.settled()                           # now the blocks may be unpinned
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from services.transfer.offers import Offer, OfferBook
from services.transfer.region import Region
from services.transfer.session import Identity, Session
from services.transfer.stats import SourceStats
from shared.clock import Clock
from shared.config import TransferConfig
from shared.ids import AttemptId, Incarnation, RequestId
from shared.messages import Endpoint


@dataclass(frozen=True, slots=True)
class Service:
    """What a door opens to."""

    region: Region
    stats: SourceStats
    new_session: Callable[[], Session]  # one per connection


class Door(Protocol):
    """Where connections come in: sockets, or the in-memory fake."""

    def endpoint(self) -> Endpoint:
        """Where readers find it. Only while it is open."""
        ...

    def open(self, service: Service) -> None:
        """From here on readers can connect; they are served once `serve` runs.

        :raises OSError: the address is taken or not ours.
        """
        ...

    async def serve(self) -> None:
        """Serve until cancelled."""
        ...

    def close(self) -> None: ...


class TransferSource:
    """Serves blocks of `region` to readers that hold a capability.

    :param capability_key: the deployment's key, see `shared.capability`.
    """

    def __init__(
        self,
        region: Region,
        identity: Identity,
        capability_key: bytes,
        config: TransferConfig,
        clock: Clock,
        door: Door,
    ) -> None:
        self._region, self._identity, self._config = region, identity, config
        self._clock, self._door = clock, door
        self._stats = SourceStats(block_bytes=region.block_bytes)
        self._book = OfferBook(
            clock, config.hold_s, identity.incarnation, capability_key, region.num_blocks, self._stats
        )

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then every open offer is withdrawn. Started = readers can connect.

        :raises OSError: the address is taken or not ours.
        """
        try:
            self._door.open(Service(self._region, self._stats, self._new_session))
            async with anyio.create_task_group() as tg:
                tg.start_soon(self._door.serve)
                tg.start_soon(self._tend)
                task_status.started()
        finally:
            self._door.close()
            self._book.close("source shut down")

    def endpoint(self) -> Endpoint:
        """What the worker registers. Only while it serves."""
        return self._door.endpoint()

    def open(self, request_id: RequestId, epoch: int, attempt: AttemptId, reader: Incarnation) -> Offer:
        """Begin to offer a request's blocks to that reader, who may be waiting already.

        It ends when the reader releases it, when the worker withdraws it, or once the hold time has passed
        without a sign of the reader or a `keep`.
        """
        return self._book.open(request_id, epoch, attempt, reader)

    def stats(self) -> SourceStats:
        return self._stats.snapshot()

    def _new_session(self) -> Session:
        return Session(self._book, self._identity, self._region.block_bytes, self._stats)

    async def _tend(self) -> None:
        """Settle overdue offers, and reassure waiting readers well within their idle time."""
        tick_s = min(self._config.hold_s, self._config.idle_timeout_s, 10.0) / 10
        reassured = self._clock.now()
        while True:
            await self._clock.sleep(tick_s)
            self._book.tend()
            if self._clock.now() - reassured > self._config.idle_timeout_s / 4:
                reassured = self._clock.now()
                self._book.reassure()
