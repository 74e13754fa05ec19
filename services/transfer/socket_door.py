"""The source's sockets: tcp for anyone, a unix socket for readers that can map our memory file."""

import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskStatus

from services.transfer.frames import frame, read_frame, reader_messages
from services.transfer.region import Region
from services.transfer.session import Sending, Session
from services.transfer.stats import SourceStats
from services.transfer.wire import SLICE_BYTES, LinkLost, Listener, Wire, host_id, listen_tcp, listen_unix
from shared.clock import Clock
from shared.config import TransferConfig
from shared.errors import WireError
from shared.ids import BlockId
from shared.messages import Data, Endpoint, Refused

MAX_CONNECTIONS = 1024

log = structlog.get_logger("transfer.source")


class SocketDoor:
    """Listens. Owner of the listening sockets and of every connection.

    :param host: address to bind, and that readers are told.
    :param port: 0 = any.
    :param run_dir: folder for the unix socket; "" = a private temporary one.
    """

    def __init__(self, host: str, port: int, run_dir: str, name: str, config: TransferConfig, clock: Clock) -> None:
        self._host, self._port, self._run_dir, self._name = host, port, run_dir, name
        self._config, self._clock = config, clock
        self._endpoint: Endpoint | None = None

    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "not serving"
        return self._endpoint

    async def serve(
        self,
        region: Region,
        stats: SourceStats,
        new_session: Callable[[], Session],
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """:raises OSError: the tcp address is taken or not ours."""
        with tempfile.TemporaryDirectory(prefix="baton-") as private:
            tcp = listen_tcp(self._host, self._port)
            unix = self._listen_unix(region, Path(self._run_dir or private))
            self._endpoint = Endpoint(
                host=self._host, port=tcp.port, shm_path=unix.path if unix else "", host_id=host_id()
            )
            try:
                async with anyio.create_task_group() as tg:
                    for listener in filter(None, (tcp, unix)):
                        tg.start_soon(self._accept, listener, region, stats, new_session)
                    task_status.started()
            finally:
                self._endpoint = None
                for listener in filter(None, (tcp, unix)):
                    listener.close()

    def _listen_unix(self, region: Region, folder: Path) -> Listener | None:
        if region.fd < 0 or "shm" not in self._config.transports or not host_id():
            return None
        try:
            return listen_unix(str(folder / f"{self._name}.sock"))
        except OSError as exc:
            log.warning("transfer.no_shm", folder=str(folder), reason=str(exc))
            return None

    async def _accept(
        self, listener: Listener, region: Region, stats: SourceStats, new_session: Callable[[], Session]
    ) -> None:
        fd = region.fd if listener.path else -1
        async with anyio.create_task_group() as tg:
            while True:
                try:
                    wire = await listener.accept(self._config.idle_timeout_s, self._config.connect_timeout_s)
                except OSError as exc:  # out of file descriptors: those we have may end
                    log.warning("transfer.accept_failed", reason=str(exc))
                    await self._clock.sleep(0.1)
                    continue
                if stats.connections >= MAX_CONNECTIONS:
                    stats.refused += 1
                    wire.close()
                    continue
                connection = _Connection(wire, new_session(), region, fd, stats, self._config.connect_timeout_s)
                tg.start_soon(connection.run)


class _Connection:
    """One reader's connection: a task that reads messages, a task that sends what the session gives out."""

    def __init__(
        self, wire: Wire, session: Session, region: Region, fd: int, stats: SourceStats, hello_timeout_s: float
    ) -> None:
        self._wire, self._session, self._region = wire, session, region
        self._fd, self._stats, self._hello_timeout_s = fd, stats, hello_timeout_s
        self._filler = memoryview(bytes(min(SLICE_BYTES, region.block_bytes)))

    async def run(self) -> None:
        self._stats.connections += 1
        try:
            with self._noting_the_end():
                if await self._greet():
                    async with anyio.create_task_group() as tg:
                        tg.start_soon(self._run_loop, self._send_loop, tg.cancel_scope)
                        await self._run_loop(self._receive_loop, tg.cancel_scope)
        finally:
            self._stats.connections -= 1
            self._session.close()
            self._wire.close()

    async def _run_loop(self, loop: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        """The end of either loop, orderly or not, ends the connection."""
        with self._noting_the_end():
            await loop()
        scope.cancel()

    @contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        try:
            yield
        except LinkLost as exc:
            log.debug("transfer.connection_ended", reason=str(exc))
        except WireError as exc:
            self._stats.malformed += 1
            log.warning("transfer.malformed", reason=str(exc))

    async def _greet(self) -> bool:
        hello = None
        with anyio.move_on_after(self._hello_timeout_s):
            hello = await read_frame(self._wire, reader_messages, patient=False)
        if hello is None:
            raise LinkLost("no hello came")
        answer = self._session.hello(hello)
        if isinstance(answer, Refused) or self._fd < 0:
            await self._wire.send_all(frame(answer))
        else:
            await self._wire.send_with_fd(frame(answer), self._fd)
        return not isinstance(answer, Refused)

    async def _receive_loop(self) -> None:
        while True:
            message = await read_frame(self._wire, reader_messages, patient=True)
            self._session.handle(message)
            await self._session.room()

    async def _send_loop(self) -> None:
        while True:
            item = self._session.take()
            if isinstance(item, Sending):
                await self._send_blocks(item)
            elif item is not None:
                await self._wire.send_all(frame(item))
            elif self._session.is_closing:
                return
            else:
                await self._session.changed()

    async def _send_blocks(self, sending: Sending) -> None:
        request_id, epoch = sending.offer.key
        num_bytes = len(sending.block_ids) * self._region.block_bytes
        await self._wire.send_all(frame(Data(request_id=request_id, epoch=epoch, num_bytes=num_bytes)))
        for block_id in sending.block_ids:
            whole = await self._send_block(sending, block_id)
            if whole:
                self._stats.blocks_sent += 1
                self._stats.bytes_sent += self._region.block_bytes
        if sending.offer.is_open:
            sending.offer.touch()

    async def _send_block(self, sending: Sending, block_id: BlockId) -> bool:
        """Send one block, in slices, each only while the offer is open; else zeros, so that the frames after
        it keep their place. Returns whether all bytes were the block's."""
        view = self._region.block(block_id)
        num_sent, num_filler = 0, 0
        while num_sent < len(view):
            end = min(num_sent + SLICE_BYTES, len(view))
            if sending.offer.is_open:
                count = self._wire.send_now(view[num_sent:end])
            else:
                count = self._wire.send_now(self._filler[: end - num_sent])
                num_filler += count
            num_sent += count
            if not count:
                await self._wire.writable()
        self._stats.bytes_filler += num_filler
        await anyio.lowlevel.checkpoint()
        return num_filler == 0
