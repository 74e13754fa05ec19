"""The fake transfer network, watched: what a source promises and where bytes land."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from services.transfer.fake import FakeLink, FakeNetwork, Faults
from services.transfer.landing import Ticket
from services.transfer.session import Sending, Session
from services.transfer.source import Service
from shared.ids import BlockId, Incarnation
from shared.messages import ReleaseAnswer

if TYPE_CHECKING:
    from tests.sim.world import World


class WatchedNetwork(FakeNetwork):
    """Tells the judge of every answer to a release and of every block that lands."""

    def __init__(self, world: World) -> None:
        super().__init__(world.clock, Faults())
        self.world = world

    def link(self, reader: Incarnation, service: Service, session: Session, num_blocks: int) -> FakeLink:
        link = WatchedLink(self, reader, service, session, num_blocks)
        if self.world.plan.shm:
            link.mapped = MappedBlocks(self, service)  # type: ignore[assignment]
        self._links.append(link)
        return link


class MappedBlocks:
    """A source's blocks as a reader on the same host sees them: `mapped[block]` is read when it copies."""

    def __init__(self, network: WatchedNetwork, service: Service) -> None:
        self._network, self._region = network, service.region

    def __getitem__(self, block: BlockId) -> np.ndarray:
        network = self._network
        number, network.num_moved = network.num_moved, network.num_moved + 1
        data = np.frombuffer(self._region.block(block), dtype=np.uint8)
        if number in network.faults.flip_blocks:
            data = data.copy()
            data[len(data) // 2] ^= 1
        return data


class WatchedLink(FakeLink):
    """One connection."""

    def __init__(self, network: WatchedNetwork, *args: Any) -> None:
        super().__init__(network, *args)
        self._judge = network.world.judge
        pass_on = self.routes.dispatch

        def dispatch(message: Any) -> None:
            if isinstance(message, ReleaseAnswer):
                book = self._session._book
                self._judge.released(self.reader, message, book.find((message.request_id, message.epoch)))
            pass_on(message)

        self.routes.dispatch = dispatch  # type: ignore[method-assign]

    def _move_block(self, ticket: Ticket, sending: Sending, block_id: BlockId) -> bool:
        if not ticket.abandoned:
            piece = ticket.pieces[ticket.num_received // ticket.region.block_bytes]
            self._judge.byte_lands(self.reader, piece.dest)
        return super()._move_block(ticket, sending, block_id)
