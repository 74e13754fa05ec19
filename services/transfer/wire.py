"""Raw sockets: the one file of this room that touches them.

Receiving is a wait for readiness followed by a receive that never blocks. So no buffer is ever lent to the
event loop across an await: whoever gives up a read knows that no byte can land in its memory afterwards.
"""

import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel

from shared.errors import TransferError

SLICE_BYTES = 1 << 20  # moved at most between two turns of the event loop
MAX_VIEWS = 64  # of one system call
_BACKLOG = 128


class LinkLost(TransferError):
    """The connection ended, or its peer fell silent. A new one may help."""


class Wire:
    """One connected stream socket. Owner of the socket; at most one task receives and one sends.

    :param timeout_s: longest silence in the middle of something; then the peer counts as gone.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._timeout_s = timeout_s
        self._collect_fds = False
        self.fds: list[int] = []  # received while `collecting_fds`; whoever reads the list closes them

    async def recv_exactly(self, num_bytes: int, *, patient: bool = False) -> bytearray:
        """Exactly so many bytes. `patient`: no limit on the wait for the first.

        :raises LinkLost: end of stream, reset or silence.
        """
        data = bytearray(num_bytes)
        view = memoryview(data)
        num_got = 0
        while num_got < num_bytes:
            count = self.recv_now([view[num_got:]])
            num_got += count
            if not count:
                await self.readable(patient=patient and num_got == 0)
        return data

    def recv_now(self, views: Sequence[memoryview]) -> int:
        """Receive into the views what is there, without waiting. Mutates them.

        :returns: the number of bytes; 0 = none yet.
        :raises LinkLost: end of stream or reset.
        """
        try:
            if self._collect_fds:
                count = self._recv_with_fds(views)
            elif len(views) == 1:
                count = self._sock.recv_into(views[0])
            else:
                count = self._sock.recvmsg_into(views[:MAX_VIEWS])[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            raise LinkLost(f"connection failed: {exc.strerror or exc}") from None
        if count == 0:
            raise LinkLost("connection closed by the peer")
        return count

    def _recv_with_fds(self, views: Sequence[memoryview]) -> int:
        size = socket.CMSG_SPACE(struct.calcsize("i"))
        count, ancillary, _, _ = self._sock.recvmsg_into(views, size, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(fd for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4]))
        return count

    @asynccontextmanager
    async def collecting_fds(self) -> AsyncIterator[list[int]]:
        """While open, file descriptors that the peer passes along are gathered; closed at the end."""
        self._collect_fds = True
        try:
            yield self.fds
        finally:
            self._collect_fds = False
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()

    def send_now(self, data: memoryview | bytes) -> int:
        """Send what fits without waiting. Returns the number of bytes, 0 = no room now.

        :raises LinkLost: the peer is gone.
        """
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            raise LinkLost(f"connection failed: {exc.strerror or exc}") from None

    async def send_all(self, data: bytes) -> None:
        """:raises LinkLost: the peer is gone, or takes nothing for the wire's timeout."""
        view = memoryview(data)
        while view:
            count = self.send_now(view[:SLICE_BYTES])
            view = view[count:]
            if not count:
                await self.writable()

    async def send_with_fd(self, data: bytes, fd: int) -> None:
        """As `send_all`, with a file descriptor beside the first byte (unix sockets only)."""
        while True:
            try:
                count = socket.send_fds(self._sock, [data], [fd])
                break
            except (BlockingIOError, InterruptedError):
                await self.writable()
            except OSError as exc:
                raise LinkLost(f"connection failed: {exc.strerror or exc}") from None
        await self.send_all(data[count:])

    async def readable(self, *, patient: bool = False) -> None:
        await self._wait(anyio.wait_readable, None if patient else self._timeout_s)

    async def writable(self) -> None:
        await self._wait(anyio.wait_writable, self._timeout_s)

    async def _wait(self, ready, timeout_s: float | None) -> None:
        try:
            with anyio.fail_after(timeout_s):
                await ready(self._sock)
        except TimeoutError:
            raise LinkLost(f"nothing moved for {timeout_s:g} s") from None
        except (anyio.ClosedResourceError, ValueError, OSError):
            raise LinkLost("connection closed here") from None

    def close(self) -> None:
        """Idempotent. Once it returns nothing is received any more; tasks that wait get LinkLost."""
        if self._sock.fileno() >= 0:
            anyio.notify_closing(self._sock)
            self._sock.close()


def _tune(sock: socket.socket, timeout_s: float) -> None:
    """Small frames at once; a cut link is noticed by the kernel, with or without data under way."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_USER_TIMEOUT": max(1, int(timeout_s * 1000)),
        "TCP_KEEPIDLE": 5,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 3,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect_tcp(host: str, port: int, connect_timeout_s: float, idle_timeout_s: float) -> Wire:
    """:raises LinkLost: nobody answers there within `connect_timeout_s`."""
    try:
        with anyio.fail_after(connect_timeout_s):
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            sock = await _connect(family, address)
    except (OSError, TimeoutError) as exc:
        raise LinkLost(f"cannot connect to {host}:{port}: {exc or 'timed out'}") from None
    _tune(sock, connect_timeout_s)
    return Wire(sock, idle_timeout_s)


async def connect_unix(path: str, connect_timeout_s: float, idle_timeout_s: float) -> Wire:
    """:raises LinkLost: nobody answers there within `connect_timeout_s`."""
    try:
        with anyio.fail_after(connect_timeout_s):
            sock = await _connect(socket.AF_UNIX, path)
    except (OSError, TimeoutError) as exc:
        raise LinkLost(f"cannot connect to {path}: {exc or 'timed out'}") from None
    return Wire(sock, idle_timeout_s)


async def _connect(family: int, address) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.connect(address)
        except BlockingIOError:
            await anyio.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code)) from None
    except BaseException:
        sock.close()
        raise
    return sock


class Listener:
    """A listening socket. Owner of it, and of its path if it is a unix socket."""

    def __init__(self, sock: socket.socket, path: str = "") -> None:
        sock.setblocking(False)
        self._sock, self.path = sock, path

    @property
    def port(self) -> int:
        return self._sock.getsockname()[1]

    async def accept(self, idle_timeout_s: float, user_timeout_s: float) -> Wire:
        """The next connection.

        :raises LinkLost: closed here.
        """
        while True:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                try:
                    await anyio.wait_readable(self._sock)
                except (anyio.ClosedResourceError, ValueError):
                    raise LinkLost("listener closed") from None
                continue
            if not self.path:
                _tune(sock, user_timeout_s)
            return Wire(sock, idle_timeout_s)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            anyio.notify_closing(self._sock)
            self._sock.close()
            if self.path:
                Path(self.path).unlink(missing_ok=True)


def listen_tcp(host: str, port: int) -> Listener:
    """:raises OSError: the address is taken or not ours."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return Listener(sock)


def listen_unix(path: str) -> Listener:
    """A unix socket that only this user may connect to. The folder must exist; the path must be free.

    :raises OSError: the path is taken, or too long for a socket (107 bytes).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        Path(path).chmod(0o600)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, path)


def host_id() -> str:
    """Equal only on machines that share memory: the kernel's boot id; "" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
