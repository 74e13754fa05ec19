"""The reader's end of one connection, and how it comes about."""

from collections import deque
from typing import Literal, Protocol

import anyio
import anyio.lowlevel
import numpy as np
import structlog

from services.transfer.frames import frame, read_frame, source_messages
from services.transfer.landing import Routes, Ticket
from services.transfer.offers import Key
from services.transfer.region import Region, map_blocks
from services.transfer.session import Identity
from services.transfer.stats import ReaderStats
from services.transfer.wire import SLICE_BYTES, LinkLost, Wire, connect_tcp, connect_unix, host_id
from shared.config import TransferConfig
from shared.errors import TransferError, TransferRefused, WireError
from shared.messages import (
    PROTOCOL_VERSION,
    Data,
    Endpoint,
    Hello,
    HelloOk,
    Read,
    ReaderMsg,
    Refused,
    SourceRef,
)

SCRATCH_BYTES = 256 << 10

log = structlog.get_logger("transfer.reader")


class Link(Protocol):
    """A live connection to one source. Several requests share it."""

    transport: Literal["shm", "tcp", "fake"]
    routes: Routes
    mapped: np.ndarray | None  # the source's blocks [num_blocks, block_bytes], if this process can see them
    num_blocks: int  # of the source

    def post(self, message: ReaderMsg) -> None:
        """Queue a message, without waiting. Dropped if the link is lost: `routes` tells everybody so."""
        ...

    async def run(self) -> None:
        """Move messages and bytes until the link is lost, which raises nothing. Then no byte lands any more."""
        ...

    def close(self) -> None:
        """Lose it now, from this side. Idempotent."""
        ...


class Dialer(Protocol):
    async def dial(self, source: SourceRef) -> Link:
        """Connect and greet.

        :raises LinkLost: nobody answers.
        :raises TransferRefused: the source does not want us, or the pools do not fit.
        """
        ...


def start_read(link: Link, key: Key, ticket: Ticket) -> None:
    """Ask for the ticket's bytes; over shared memory there is nothing to ask."""
    if ticket.mapped is None:
        link.routes.expect(key, ticket)
        ids = tuple(piece.source for piece in ticket.pieces)
        link.post(Read(request_id=key[0], epoch=key[1], block_ids=ids))


class SocketLink:
    """A link over a stream socket: tcp, or a unix socket beside shared memory. Owner of the wire."""

    transport: Literal["shm", "tcp", "fake"]

    def __init__(
        self,
        wire: Wire,
        transport: Literal["shm", "tcp"],
        num_blocks: int,
        mapped: np.ndarray | None,
        stats: ReaderStats,
    ) -> None:
        self._wire, self.transport, self._stats = wire, transport, stats
        self.num_blocks, self.mapped = num_blocks, mapped
        self.routes = Routes()
        self._outbox: deque[bytes] = deque()
        self._filled = anyio.Event()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    def post(self, message: ReaderMsg) -> None:
        if self.routes.lost is None:
            self._outbox.append(frame(message))
            self._filled.set()

    async def run(self) -> None:
        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(self._guarded, self._send_loop, tg.cancel_scope)
                await self._guarded(self._receive_loop, tg.cancel_scope)
        finally:
            self.close()

    def close(self) -> None:
        self._wire.close()
        self.routes.lose(LinkLost("link closed here"))
        self.mapped = None

    async def _guarded(self, body, scope: anyio.CancelScope) -> None:
        try:
            await body()
        except LinkLost as exc:
            self.routes.lose(exc)
        except WireError as exc:
            self.routes.lose(LinkLost(f"source talks nonsense: {exc}"))
        scope.cancel()

    async def _send_loop(self) -> None:
        while True:
            while self._outbox:
                data = b"".join(self._outbox)
                self._outbox.clear()
                await self._wire.send_all(data)
            self._filled = anyio.Event()
            await self._filled.wait()

    async def _receive_loop(self) -> None:
        while True:
            message = await read_frame(self._wire, source_messages, patient=True)
            if isinstance(message, Data):
                key = (message.request_id, message.epoch)
                await self._receive_blocks(self.routes.next_ticket(key, message.num_bytes))
            elif isinstance(message, HelloOk):
                raise WireError("a second hello")
            else:
                self.routes.dispatch(message)

    async def _receive_blocks(self, ticket: Ticket) -> None:
        """Fill the ticket; once it is abandoned, the rest goes nowhere."""
        num_left, num_landed, num_since_turn = ticket.num_bytes, 0, 0
        try:
            while num_left:
                if ticket.abandoned:
                    count = self._wire.recv_now([self._scratch[:num_left]])
                else:
                    count = self._wire.recv_now(ticket.views())
                    num_landed += count
                    ticket.received(count)
                num_left -= count
                num_since_turn += count
                if not count:
                    num_since_turn = 0
                    await self._wire.readable()
                elif num_since_turn >= SLICE_BYTES:
                    num_since_turn = 0
                    await anyio.lowlevel.checkpoint()
        finally:
            if not ticket.landed:
                self._stats.bytes_discarded += ticket.num_bytes - num_left
                ticket.abandon()


class SocketDialer:
    """Connects by the first transport of the configured order that works for the source."""

    def __init__(self, identity: Identity, region: Region, config: TransferConfig, stats: ReaderStats) -> None:
        self._identity, self._region = identity, region
        self._config, self._stats = config, stats

    async def dial(self, source: SourceRef) -> Link:
        if len(source.endpoints) != 1:
            raise TransferRefused(f"source has {len(source.endpoints)} ranks, this reader one")
        endpoint = source.endpoints[0]
        failure: TransferError = TransferRefused("no transport in common with the source")
        for transport in self._config.transports:
            if transport == "shm" and not (endpoint.shm_path and endpoint.host_id and endpoint.host_id == host_id()):
                continue
            try:
                link = await self._dial(transport, endpoint, source)
            except (LinkLost, TransferRefused) as exc:
                failure = exc
                log.warning("transfer.dial_failed", transport=transport, worker=source.worker_id, reason=str(exc))
                continue
            self._stats.links_shm += transport == "shm"
            self._stats.links_tcp += transport == "tcp"
            log.info("transfer.linked", transport=transport, worker=source.worker_id, source=source.incarnation)
            return link
        raise failure

    async def _dial(self, transport: Literal["shm", "tcp"], endpoint: Endpoint, source: SourceRef) -> Link:
        limits = (self._config.connect_timeout_s, self._config.idle_timeout_s)
        if transport == "shm":
            wire = await connect_unix(endpoint.shm_path, *limits)
        else:
            wire = await connect_tcp(endpoint.host, endpoint.port, *limits)
        try:
            with anyio.fail_after(self._config.connect_timeout_s):
                answer, mapped = await self._greet(wire, source, want_memory=transport == "shm")
        except (TimeoutError, WireError) as exc:
            wire.close()
            raise LinkLost(f"no proper hello: {exc or 'timed out'}") from None
        except BaseException:
            wire.close()
            raise
        return SocketLink(wire, transport, answer.num_blocks, mapped, self._stats)

    async def _greet(self, wire: Wire, source: SourceRef, *, want_memory: bool) -> tuple[HelloOk, np.ndarray | None]:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            reader=self._identity.incarnation,
            fingerprint=self._identity.fingerprint,
            source=source.incarnation,
        )
        await wire.send_all(frame(hello))
        async with wire.collecting_fds() as fds:
            answer = await read_frame(wire, source_messages, patient=False)
            check_hello(answer, self._region)
            assert isinstance(answer, HelloOk)
            if not want_memory:
                return answer, None
            if len(fds) != 1:
                raise LinkLost("the source handed out no memory file")
            try:
                return answer, map_blocks(fds[0], answer.num_blocks, answer.block_bytes)
            except OSError as exc:
                raise LinkLost(f"cannot map the source's memory: {exc}") from None


def check_hello(answer: object, region: Region) -> None:
    """:raises TransferRefused: no, or blocks of another size than ours."""
    if isinstance(answer, Refused):
        raise TransferRefused(f"source refuses: {answer.reason}")
    if not isinstance(answer, HelloOk):
        raise WireError("expected the answer to a hello")
    if answer.block_bytes != region.block_bytes or answer.num_blocks <= 0:
        raise TransferRefused(f"source has blocks of {answer.block_bytes} bytes, ours have {region.block_bytes}")
