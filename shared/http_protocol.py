"""uvicorn's HTTP/1.1 with bounds that it has not: connections, and the times of their parts.

Without these a client holds a connection for ever (slow loris), key or no key, that sends a byte now and then, of a
header or of a body that was answered already (a refusal needs no body), or that never reads its answers. The time of a
body that is waited for is bounded by whoever reads it, an idle connection's by uvicorn.
"""

import asyncio
import contextlib
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HttpProtocol(H11Protocol):
    """uvicorn's, but for what it answers to bytes that are no HTTP: an error in the shape of all others."""

    def send_400_response(self, msg: str) -> None:
        error = {"message": msg, "type": "invalid_request_error", "param": None, "code": "invalid_http"}
        body = json.dumps({"error": error}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # in the middle of an answer: then the connection just ends
            event = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for part in (event, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """No line in the log: some clients ask for HTTP/2 with every request, and get HTTP/1.1."""


class BoundedProtocol(HttpProtocol):
    """With bounds; `bounded_protocol` sets them."""

    header_timeout_s: float
    max_connections: int
    stall_s: float
    _head_timer: asyncio.TimerHandle | None = None
    _has_part = False  # of a request's head
    _rest_timer: asyncio.TimerHandle | None = None  # of a body that nobody waits for
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._has_part = True
            self._wait_for_head()
        else:
            self._head_came()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        for timer in (self._rest_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        answered = self.cycle if self.conn.their_state is h11.SEND_BODY else None
        super().on_response_complete()
        if answered is not None:
            if self._rest_timer is not None:
                self._rest_timer.cancel()
            self._rest_timer = self.loop.call_later(self.header_timeout_s, self._rest_is_late, answered)

    def _rest_is_late(self, answered: Any) -> None:
        if self.cycle is answered and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _watch_writing(self, size: int) -> None:
        self._stall_timer = self.loop.call_later(self.stall_s, self._look_at_writing, size)

    def _look_at_writing(self, before: int) -> None:
        """`before`: bytes that waited to be written when we last looked."""
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._watch_writing(size)
        else:
            self.transport.abort()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_timeout_s, self._head_is_late)

    def _head_came(self) -> None:
        self._has_part = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self._has_part:
                self.transport.write(_TOO_SLOW)
            self.transport.close()


def bounded_protocol(header_timeout_s: float, max_connections: int, stall_s: float) -> type[asyncio.Protocol]:
    """The protocol class for a server with these bounds.

    :param stall_s: a connection whose other end takes none of an answer for so long is cut.
    """
    bounds = {"header_timeout_s": header_timeout_s, "max_connections": max_connections, "stall_s": stall_s}
    return type("Bounded", (BoundedProtocol,), bounds)
