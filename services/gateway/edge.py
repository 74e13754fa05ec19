"""The app's outermost layer: a request gets its id and its caller here, and every answer says both.

`x-request-id` is the client's, if it sent a fit one, else a new one; all log lines of the request carry it.
"""

import re

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import ApiError, error_response
from services.gateway.gate import Caller, Gate, set_caller
from services.gateway.ports import Observer
from shared.randomness import Randomness

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json"})
"""What anyone may see. All other paths, known or not, need a key where one is asked for."""
EXPOSED_HEADERS = (
    *("x-request-id", "retry-after"),
    *(
        f"x-ratelimit-{kind}-{what}"
        for kind in ("limit", "remaining", "reset")
        for what in ("requests", "tokens", "concurrent")
    ),
)
_ID = re.compile(r"[A-Za-z0-9._:@+=/-]{1,128}")


class Edge:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, gate: Gate | None, randomness: Randomness, observer: Observer) -> None:
        self._app, self._gate, self._randomness, self._observer = app, gate, randomness, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id, caller = self._request_id(headers), Caller()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(b"x-request-id", request_id.encode()), *caller.headers()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        with structlog.contextvars.bound_contextvars(x_request_id=request_id):
            try:
                caller = await self._enter(scope, headers)
            except ApiError as exc:
                self._observer.refused(exc.status, exc.code or "")
                await error_response(exc)(scope, receive, named)
                return
            set_caller(scope, caller)
            try:
                await self._app(scope, receive, named)
            finally:
                if self._gate is not None:
                    await self._gate.leave(caller)

    async def _enter(self, scope: Scope, headers: Headers) -> Caller:
        """:raises ApiError: as `Gate.enter`."""
        if self._gate is None or scope["path"] in OPEN_PATHS:
            return Caller()
        return await self._gate.enter(headers, self._randomness.token(16), counts=scope["method"] == "POST")

    def _request_id(self, headers: Headers) -> str:
        """A second request may bear the same id: it names what the client does, and finds log lines; nothing else."""
        given = headers.get("x-request-id", "")
        return given if _ID.fullmatch(given) else f"req-{self._randomness.token(12)}"
