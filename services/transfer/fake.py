"""Transfers in memory: the same source and reader, over a wire that is two method calls.

Deterministic: no socket, no thread, no time but the clock handed in. Faults are injected by name.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

import anyio
import anyio.lowlevel
import numpy as np

from services.transfer.landing import Routes, Ticket
from services.transfer.links import check_hello
from services.transfer.reader import TransferReader
from services.transfer.region import Region
from services.transfer.session import Identity, Sending, Session
from services.transfer.source import Service, TransferSource
from services.transfer.stats import ReaderStats
from services.transfer.wire import LinkLost
from shared.clock import Clock
from shared.config import TransferConfig
from shared.errors import WireError
from shared.ids import BlockId, Incarnation
from shared.messages import (
    PROTOCOL_VERSION,
    Data,
    Endpoint,
    Gone,
    Hello,
    HelloOk,
    ReaderMsg,
    Ready,
    Refused,
    Release,
    ReleaseAnswer,
    SourceRef,
)
from shared.offload import Offload


@dataclass(slots=True)
class Faults:
    """What goes wrong. Block numbers count the blocks that the network has moved, from 0."""

    flip_blocks: frozenset[int] = frozenset()  # one byte of each arrives wrong
    drop_at_blocks: frozenset[int] = frozenset()  # the connection breaks half-way through the block
    lose_releases: bool = False  # releases never arrive
    delay_s: float = 0.0  # per block, on the network's clock


class FakeNetwork:
    """Where fake sources and readers meet. Owner of the faults and of the count of blocks moved."""

    def __init__(self, clock: Clock, faults: Faults | None = None) -> None:
        self.clock = clock
        self.faults = faults or Faults()
        self.num_moved = 0
        self.services: dict[str, Service] = {}
        self._links: list[FakeLink] = []

    def source(
        self, region: Region, identity: Identity, capability_key: bytes, config: TransferConfig
    ) -> TransferSource:
        """As `socket_source`; its incarnation is its host in the endpoint."""
        door = FakeDoor(self, identity.incarnation)
        return TransferSource(region, identity, capability_key, config, self.clock, door)

    def reader(self, region: Region, identity: Identity, config: TransferConfig, offload: Offload) -> TransferReader:
        """As `socket_reader`."""
        dialer = FakeDialer(self, identity, region)
        stats = ReaderStats(block_bytes=region.block_bytes)
        return TransferReader(region, config, self.clock, offload, dialer, stats)

    def link(self, reader: Incarnation, service: Service, session: Session, num_blocks: int) -> "FakeLink":
        link = FakeLink(self, reader, service, session, num_blocks)
        self._links.append(link)
        return link

    def cut(self, service: Service | None = None, reader: Incarnation | None = None) -> None:
        """Break the connections: all, or those of one service, or those of one reader."""
        for link in self._links:
            if (service is None or link.service is service) and (reader is None or link.reader == reader):
                link.cut()
        self._links = [link for link in self._links if link.routes.lost is None]


class FakeDoor:
    """See `source.Door`."""

    def __init__(self, network: FakeNetwork, name: str) -> None:
        self._network, self._name = network, name

    def endpoint(self) -> Endpoint:
        return Endpoint(host=self._name, port=1)

    def open(self, service: Service) -> None:
        assert self._name not in self._network.services
        self._network.services[self._name] = service

    async def serve(self) -> None:
        await anyio.sleep_forever()

    def close(self) -> None:
        service = self._network.services.pop(self._name, None)
        if service is not None:
            self._network.cut(service)


class FakeDialer:
    """See `links.Dialer`."""

    def __init__(self, network: FakeNetwork, identity: Identity, region: Region) -> None:
        self._network, self._identity, self._region = network, identity, region

    async def dial(self, source: SourceRef) -> "FakeLink":
        await anyio.lowlevel.checkpoint()
        service = self._network.services.get(source.endpoints[0].host)
        if service is None:
            raise LinkLost("nobody listens there")
        session = service.new_session()
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            reader=self._identity.incarnation,
            fingerprint=self._identity.fingerprint,
            source=source.incarnation,
        )
        answer = session.hello(hello)
        check_hello(answer, self._region)
        assert isinstance(answer, HelloOk)
        return self._network.link(self._identity.incarnation, service, session, answer.num_blocks)


class FakeLink:
    """See `links.Link`. Moves a message or a block per turn of the loop."""

    transport: Literal["shm", "tcp", "fake"] = "fake"

    def __init__(
        self, network: FakeNetwork, reader: Incarnation, service: Service, session: Session, num_blocks: int
    ) -> None:
        self._network, self.reader, self.service, self._session = network, reader, service, session
        self.num_blocks = num_blocks
        self.mapped: np.ndarray | None = None
        self.routes = Routes()
        self._outbox: deque[ReaderMsg] = deque()
        self._filled = anyio.Event()

    def post(self, message: ReaderMsg) -> None:
        if self.routes.lost is None:
            self._outbox.append(message)
            self._filled.set()

    def cut(self) -> None:
        """Break it now: nothing lands any more, and the source forgets the connection."""
        if self.routes.lost is None:
            self.routes.lose(LinkLost("connection cut"))
            self._session.close()
            self._filled.set()

    def close(self) -> None:
        self.cut()

    async def run(self) -> None:
        self.service.stats.connections += 1
        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(self._carry_up, tg.cancel_scope)
                await self._carry_down(tg.cancel_scope)
        finally:
            self.service.stats.connections -= 1
            self.cut()

    async def _carry_up(self, scope: anyio.CancelScope) -> None:
        """Reader to source."""
        while self.routes.lost is None:
            while self._outbox and self.routes.lost is None:
                message = self._outbox.popleft()
                if isinstance(message, Release) and self._network.faults.lose_releases:
                    continue
                try:
                    self._session.handle(message)
                except WireError:
                    self.service.stats.malformed += 1
                    self.cut()
                await anyio.lowlevel.checkpoint()
                await self._session.room()
            if self.routes.lost is None:
                self._filled = anyio.Event()
                await self._filled.wait()
        scope.cancel()

    async def _carry_down(self, scope: anyio.CancelScope) -> None:
        """Source to reader."""
        while self.routes.lost is None:
            item = self._session.take()
            if isinstance(item, Sending):
                await self._move(item)
            elif isinstance(item, Ready | Gone | Refused | ReleaseAnswer):
                self.routes.dispatch(item)
                await anyio.lowlevel.checkpoint()
            elif self._session.is_closing:
                self.cut()
            else:
                assert item is None or not isinstance(item, Data | HelloOk)
                await self._session.changed()
        scope.cancel()

    async def _move(self, sending: Sending) -> None:
        block_bytes = self.service.region.block_bytes
        ticket = self.routes.next_ticket(sending.offer.key, len(sending.block_ids) * block_bytes)
        for block_id in sending.block_ids:
            if self._network.faults.delay_s:
                await self._network.clock.sleep(self._network.faults.delay_s)
            await anyio.lowlevel.checkpoint()
            if not self._move_block(ticket, sending, block_id):
                ticket.abandon()
                return

    def _move_block(self, ticket: Ticket, sending: Sending, block_id: BlockId) -> bool:
        """Move one block, as far as the faults let it. Mutates the destination. False: the link is broken."""
        number, self._network.num_moved = self._network.num_moved, self._network.num_moved + 1
        if self.routes.lost is not None:
            return False
        data = bytearray(self.service.region.block(block_id))
        if not sending.offer.is_open:
            data = bytearray(len(data))
            self.service.stats.bytes_filler += len(data)
        if number in self._network.faults.flip_blocks:
            data[len(data) // 2] ^= 1
        if number in self._network.faults.drop_at_blocks:
            data = data[: len(data) // 2]
        if not ticket.abandoned:
            landed = 0
            while landed < len(data):
                view = ticket.views()[0]
                count = min(len(view), len(data) - landed)
                view[:count] = data[landed : landed + count]
                landed += count
                ticket.received(count)
        if number in self._network.faults.drop_at_blocks:
            self.cut()
            return False
        if sending.offer.is_open:
            self.service.stats.blocks_sent += 1
            self.service.stats.bytes_sent += len(data)
        return True
