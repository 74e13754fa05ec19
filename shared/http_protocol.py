"""uvicorn's HTTP/1.1 with bounds that it has not: connections, and the time in which a request's head must arrive.

Without the second, a client that sends a header's byte now and then holds a connection for ever (slow loris). The
body's time is bounded by whoever reads it, a response's by whoever writes it, an idle connection's by uvicorn.
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


def bounded_protocol(header_timeout_s: float, max_connections: int) -> type[asyncio.Protocol]:
    """The protocol class for a server with these bounds."""

    class BoundedProtocol(HttpProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _has_part = False  # of a request's head

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
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
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(header_timeout_s, self._head_is_late)

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

    return BoundedProtocol
