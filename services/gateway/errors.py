"""What a client gets instead of an answer, in OpenAI's shape."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refusal that the client may read: no internals in it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s
        self.extra_headers: Sequence[tuple[bytes, bytes]] = ()

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of a stream's `error` event."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        out = {name.decode(): value.decode() for name, value in self.extra_headers}
        if self.retry_after_s is not None:
            out["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            out["www-authenticate"] = "Bearer"
        return out


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def queue_full() -> ApiError:
    return ApiError(429, "The server's queue is full; try again later.", code="queue_full", retry_after_s=1)


def no_worker() -> ApiError:
    return ApiError(503, "No worker is ready to serve requests.", code="no_worker", retry_after_s=2)


def bus_lost() -> ApiError:
    return ApiError(503, "The request queue cannot be reached.", code="unavailable", retry_after_s=2)


def unauthorized(*, missing: bool) -> ApiError:
    """401. What is wrong with a key is not told."""
    if missing:
        return ApiError(401, "An API key is needed: Authorization: Bearer <key>.", code="missing_api_key")
    return ApiError(401, "The API key is not valid.", code="invalid_api_key")


def rate_limited(limit: str, wait_s: float) -> ApiError:
    """429 for one key's own limit."""
    seconds = max(1, math.ceil(wait_s))
    return ApiError(
        429, f"The limit of this key, {limit}, is reached.", code="rate_limit_exceeded", retry_after_s=seconds
    )


def too_large_for_limit(limit: str) -> ApiError:
    """400, not 429: to try again would not help."""
    message = f"Prompt and answer could take more tokens than this key has in a minute ({limit}); ask for fewer."
    return ApiError(400, message, param="max_tokens", code="request_too_large")


def too_many_bytes() -> ApiError:
    return ApiError(
        503, "The server holds too many large requests; try again later.", code="overloaded", retry_after_s=2
    )


def late_body(seconds: float) -> ApiError:
    return ApiError(408, f"The body did not arrive within {seconds:g} seconds.", code="body_timeout")


REFUSALS = {
    "queue_timeout": ("The request waited too long for a free worker; try again later.", 5),
    "shutting_down": ("The server is shutting down; try again.", 1),
    "cancelled": ("The request was cancelled by the server.", 1),
}
"""Why the server does not go on with a request that it had taken, by code: what the client is told, and when it may ask
again (seconds)."""


def server_refused(why: str) -> ApiError:
    """:param why: a key of `REFUSALS`; anything else is told as `cancelled`."""
    code = why if why in REFUSALS else "cancelled"
    message, retry_after_s = REFUSALS[code]
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def internal() -> ApiError:
    return ApiError(500, "The server failed to process the request.", code="internal_error")


def error_response(error: ApiError) -> Response:
    body = msgspec.json.encode(error.body())
    return Response(body, error.status, headers=error.headers(), media_type="application/json")


async def on_http_exception(request: Request, exc: Exception) -> Response:
    """Starlette's own refusals (404 for a route, 405 for a method), in the same shape."""
    assert isinstance(exc, HTTPException)
    if exc.status_code == 404:
        error = ApiError(404, f"There is no {request.method} {request.url.path}.", code="unknown_url")
    else:
        error = ApiError(exc.status_code, f"{exc.detail}: {request.method} {request.url.path}")
    response = error_response(error)
    response.headers.update(exc.headers or {})
    return response


async def on_crash(request: Request, exc: Exception) -> Response:
    """The last resort; Starlette raises the exception again for the server's log."""
    return error_response(internal())
