"""The body of a POST: bounded, JSON, an object."""

from typing import Any

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request

from services.gateway.errors import ApiError, bad_field, late_body, too_many_bytes
from services.gateway.nested_json import decode_json
from shared.clock import Clock
from shared.offload import Offload

OFFLOAD_BYTES = 128 << 10
"""Bodies beyond this are decoded, and texts tokenised, off the event loop."""

FREE_BYTES = 64 << 10
"""Of each body: ordinary requests are served whatever the large ones hold."""


class BodyBudget:
    """Bounds the bytes of all bodies that are held at once. A decoded body takes many times its bytes, and stays as
    long as its request."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # held, beyond the free ones

    def hold(self) -> "HeldBody":
        """For one request."""
        return HeldBody(self)


class HeldBody:
    """One request's part of the budget. Use as `with`: the end of the request gives it back."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0

    def grow(self, size: int) -> None:
        """The body has so many bytes by now.

        :raises ApiError: 503, all bodies together would be too large.
        """
        more = max(0, size - FREE_BYTES - self._num_bytes)
        if more and self._budget.num_bytes + more > self._budget.max_bytes:
            raise too_many_bytes()
        self._budget.num_bytes += more
        self._num_bytes += more


async def read_json(
    request: Request, max_bytes: int, offload: Offload, clock: Clock, timeout_s: float, held: HeldBody
) -> dict[str, Any]:
    """The JSON object in the body. Stops reading at `max_bytes`, and after `timeout_s`.

    :raises ApiError: 413 too large, 503 too much with those of others, 408 too slow, 415 not JSON by its content type,
        400 not a JSON object.
    :raises ClientDisconnect: the client went away.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"The content type must be application/json, not {kind!r}.", code="unsupported_media_type")
    raw = await _read_in_time(request, max_bytes, clock, timeout_s, held)
    return await decode_object(raw, max_bytes, offload)


async def _read_in_time(request: Request, max_bytes: int, clock: Clock, timeout_s: float, held: HeldBody) -> bytes:
    outcome: bytes | Exception = late_body(timeout_s)
    async with anyio.create_task_group() as tasks:

        async def expire() -> None:
            await clock.sleep(timeout_s)
            tasks.cancel_scope.cancel()

        tasks.start_soon(expire)
        try:
            outcome = await _read(request, max_bytes, held)
        except (ApiError, ClientDisconnect) as exc:  # out of the group as it is, not in a group of exceptions
            outcome = exc
        tasks.cancel_scope.cancel()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def decode_object(raw: bytes, max_bytes: int, offload: Offload) -> dict[str, Any]:
    """The JSON object that `raw` is.

    :raises ApiError: 413 too large, 400 not a JSON object.
    """
    if len(raw) > max_bytes:
        raise _too_large(max_bytes)
    value = await offload.run(_decode, raw) if len(raw) > OFFLOAD_BYTES else _decode(raw)
    if not isinstance(value, dict):
        raise bad_field("body", "The body must be a JSON object.", "invalid_json")
    return value


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")


async def _read(request: Request, max_bytes: int, held: HeldBody) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        held.grow(size)
        parts.append(part)
    return b"".join(parts)


def _decode(raw: bytes) -> Any:
    try:
        return decode_json(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise bad_field("body", f"The body is not valid JSON: {exc}", "invalid_json") from None


__all__ = ["OFFLOAD_BYTES", "BodyBudget", "ClientDisconnect", "HeldBody", "decode_object", "read_json"]
