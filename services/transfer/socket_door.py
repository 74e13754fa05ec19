"""The source's sockets: tcp for anyone, a unix socket for readers that can map our memory file."""

import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import structlog

from services.transfer.frames import frame, read_frame, reader_messages
from services.transfer.region import Region
from services.transfer.session import Sending
from services.transfer.source import Service
from services.transfer.wire import SLICE_BYTES, LinkLost, Listener, Wire, host_id, listen_tcp, listen_unix
from shared.clock import Clock
from shared.config import TransferConfig
from shared.errors import WireError
from shared.ids import BlockId
from shared.messages import Data, Endpoint, Refused

MAX_CONNECTIONS = 1024
_FILLER = memoryview(bytes(SLICE_BYTES))

log = structlog.get_logger("transfer.source")


class SocketDoor:
    """Listens. Owner of the listening sockets and of every connection.

    :param host: address to bind.
    :param advertise: address that readers are told; "" = host.
    :param port: 0 = any.
    :param run_dir: folder for the unix socket; "" = a private temporary one.
    """

    def __init__(
        self, host: str, port: int, run_dir: str, name: str, config: TransferConfig, clock: Clock, advertise: str = ""
    ) -> None:
        self._host, self._port, self._run_dir, self._name = host, port, run_dir, name
        self._advertise = advertise or host
        self._config, self._clock = config, clock
        self._endpoint: Endpoint | None = None
        self._service: Service | None = None
        self._listeners: list[Listener] = []
        self._private = ExitStack()

    def open(self, service: Service) -> None:
        """:raises OSError: the tcp address is taken or not ours."""
        assert self._endpoint is None
        self._service = service
        tcp = listen_tcp(self._host, self._port)
        self._listeners.append(tcp)
        unix = self._listen_unix(service.region)
        if unix is not None:
            self._listeners.append(unix)
        path = unix.path if unix is not None else ""
        self._endpoint = Endpoint(host=self._advertise, port=tcp.port, shm_path=path, host_id=host_id())

    def close(self) -> None:
        self._endpoint = None
        while self._listeners:
            self._listeners.pop().close()
        self._private.close()

    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "not serving"
        return self._endpoint

    async def serve(self) -> None:
        assert self._service is not None, "serve needs open"
        async with anyio.create_task_group() as tg:
            for listener in self._listeners:
                tg.start_soon(self._accept, listener, self._service)

    def _listen_unix(self, region: Region) -> Listener | None:
        if region.fd < 0 or "shm" not in self._config.transports or not host_id():
            return None
        folder = self._run_dir or self._private.enter_context(tempfile.TemporaryDirectory(prefix="baton-"))
        try:
            return listen_unix(str(Path(folder) / f"{self._name}.sock"))
        except OSError as exc:
            log.warning("transfer.no_shm", folder=folder, reason=str(exc))
            return None

    async def _accept(self, listener: Listener, service: Service) -> None:
        fd = service.region.fd if listener.path else -1
        async with anyio.create_task_group() as tg:
            while True:
                try:
                    wire = await listener.accept(self._config.idle_timeout_s, self._config.connect_timeout_s)
                except OSError as exc:  # out of file descriptors: those we have may end
                    log.warning("transfer.accept_failed", reason=str(exc))
                    await self._clock.sleep(0.1)
                    continue
                if service.stats.connections >= MAX_CONNECTIONS:
                    service.stats.refused += 1
                    wire.close()
                    continue
                connection = _Connection(wire, service, fd, self._config.connect_timeout_s)
                tg.start_soon(connection.run)


class _Connection:
    """One reader's connection: a task that reads messages, a task that sends what the session gives out."""

    def __init__(self, wire: Wire, service: Service, fd: int, hello_timeout_s: float) -> None:
        self._wire, self._session = wire, service.new_session()
        self._region, self._stats = service.region, service.stats
        self._fd, self._hello_timeout_s = fd, hello_timeout_s

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
                count = self._wire.send_now(_FILLER[: end - num_sent])
                num_filler += count
            num_sent += count
            if not count:
                await self._wire.writable()
        self._stats.bytes_filler += num_filler
        await anyio.lowlevel.checkpoint()
        return num_filler == 0
