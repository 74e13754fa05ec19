"""Who asks, and whether they may: API keys, tenants and rate limits, before any work is done for a request."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

import anyio
import structlog
from starlette.types import Scope

from services.gateway.errors import ApiError, bus_lost, rate_limited, too_large_for_limit, unauthorized
from shared.api_keys import ApiKey, opens, split
from shared.clock import Clock
from shared.errors import BusError
from shared.rate_limits import CHARGED, HOLD_S, Allowance

log = structlog.get_logger("gateway.gate")

FRESH_S = 2.0
"""A key's record may be so old: a revoked key is refused that long after, at the latest."""
MAX_KNOWN = 10_000
LEAVE_S = 2.0  # to give back what is left; the hold's end sees to the rest

_SCOPE_KEY = "baton.caller"
_LIMITS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "requests at once",
}


class KeyStore(Protocol):
    """`shared.api_keys.ApiKeys`."""

    async def any(self) -> bool: ...

    async def get(self, key_id: str) -> ApiKey | None: ...


class Limiter(Protocol):
    """`shared.rate_limits.RateLimits`."""

    async def enter(self, key: ApiKey, request: str) -> Allowance: ...

    async def charge(self, key: ApiKey, request: str, num_tokens: int) -> Allowance: ...

    async def leave(self, key: ApiKey, request: str, num_tokens: int) -> None: ...

    async def renew(self, key: ApiKey, requests: list[str]) -> None: ...


@dataclass(slots=True)
class Caller:
    """Who asks. Made by the gate; `ANYONE` where no key is asked for."""

    key: ApiKey | None = None
    request: str = ""
    limiter: Limiter | None = None
    allowance: Allowance | None = None
    used_tokens: int = CHARGED  # what the request cost in the end, once that is known

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.tenant

    async def charge(self, num_tokens: int) -> None:
        """The request may cost so many tokens: prompt and answer.

        :raises ApiError: 429, the key has not so many left; 400, it never will; 503.
        """
        if self.key is None or self.limiter is None or not self.key.tokens_per_minute:
            return
        try:
            self.allowance = await self.limiter.charge(self.key, self.request, num_tokens)
        except BusError:
            raise bus_lost() from None
        _refuse_short(self.key, self.allowance)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`x-ratelimit-*`, as OpenAI has them; and of requests at once, where that limit is reached."""
        key, now = self.key, self.allowance
        if key is None or now is None:
            return []
        rows = (
            ("requests", key.requests_per_minute, now.requests_left, now.requests_full_s),
            ("tokens", key.tokens_per_minute, now.tokens_left, now.tokens_full_s),
        )
        out: dict[str, str] = {}
        for name, limit, left, full_s in rows:
            if limit:
                out |= {f"limit-{name}": str(limit), f"remaining-{name}": str(left), f"reset-{name}": _span(full_s)}
        if now.short == "concurrent" and now.wait_s is not None:
            limit, wait = str(key.max_concurrent), _span(now.wait_s)
            out |= {"limit-concurrent": limit, "remaining-concurrent": "0", "reset-concurrent": wait}
        return [(f"x-ratelimit-{name}".encode(), value.encode()) for name, value in out.items()]


def caller_of(scope: Scope) -> Caller:
    """Who asks in this ASGI scope."""
    return scope.get(_SCOPE_KEY) or Caller()


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller


@dataclass(slots=True)
class _Known:
    record: ApiKey
    at: float


@dataclass(slots=True)
class Gate:
    """Owner of what this gateway knows of keys, and of the requests that it holds against their limits.

    Closed (a key is needed) by configuration, or from the first key on; it never opens again while it lives, whatever
    Redis says.
    """

    keys: KeyStore
    limiter: Limiter
    clock: Clock
    require: Literal["auto", "on", "off"]
    _known: dict[str, _Known] = field(default_factory=dict)
    _closed: bool = False
    _looked_at: float | None = None
    _open: dict[str, Caller] = field(default_factory=dict)

    async def enter(self, headers: Mapping[str, str], request: str, *, counts: bool) -> Caller:
        """Let a request in.

        :param request: its id, unique among all gateways.
        :param counts: it is work, which limits are for.
        :raises ApiError: 401 no key or a wrong one, 429 with `caller` set, 503 nobody can tell now.
        """
        try:
            if not await self._is_closed():
                return Caller()
            caller = Caller(await self._record(headers), request, self.limiter)
            if counts and caller.key is not None and caller.key.limited:
                caller.allowance = await self.limiter.enter(caller.key, request)
        except BusError:
            raise bus_lost() from None
        if caller.key is not None and caller.allowance is not None:
            try:
                _refuse_short(caller.key, caller.allowance)
            except ApiError as exc:
                exc.extra_headers = caller.headers()
                raise
            self._open[request] = caller
        return caller

    async def leave(self, caller: Caller) -> None:
        """The request is over, however it ended."""
        if self._open.pop(caller.request, None) is None:
            return
        assert caller.key is not None
        with anyio.move_on_after(LEAVE_S, shield=True):
            try:
                await self.limiter.leave(caller.key, caller.request, caller.used_tokens)
            except BusError as exc:
                log.warning("gate.not_left", key=caller.key.id, error=str(exc))

    async def run(self) -> None:
        """Keep what is under way held; until cancelled."""
        while True:
            await self.clock.sleep(HOLD_S / 3)
            held: dict[str, list[Caller]] = {}
            for caller in self._open.values():
                if caller.key is not None:
                    held.setdefault(caller.key.id, []).append(caller)
            for callers in held.values():
                key = callers[0].key
                assert key is not None
                with suppress(BusError):
                    await self.limiter.renew(key, [caller.request for caller in callers])

    async def _is_closed(self) -> bool:
        if self.require != "auto":
            return self.require == "on"
        now = self.clock.now()
        if not self._closed and (self._looked_at is None or now - self._looked_at > FRESH_S):
            self._closed = await self.keys.any()
            self._looked_at = now
        return self._closed

    async def _record(self, headers: Mapping[str, str]) -> ApiKey:
        """:raises ApiError: 401."""
        kind, _, text = headers.get("authorization", "").partition(" ")
        parts = split(text.strip()) if kind.lower() == "bearer" else None
        if parts is None:
            raise unauthorized(missing=not text)
        key_id, secret = parts
        known = self._known.get(key_id)
        if known is None or self.clock.now() - known.at > FRESH_S:
            record = await self.keys.get(key_id)
            self._known.pop(key_id, None)
            if record is not None:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key_id] = _Known(record, self.clock.now())
        else:
            record = known.record
        if not opens(record, secret):
            raise unauthorized(missing=False)
        assert record is not None
        return record


def _refuse_short(key: ApiKey, allowance: Allowance) -> None:
    if allowance.short is None:
        return
    limit = {
        "requests": key.requests_per_minute,
        "tokens": key.tokens_per_minute,
        "concurrent": key.max_concurrent,
    }[allowance.short]
    what = f"{limit} {_LIMITS[allowance.short]}"
    if allowance.wait_s is None:
        raise too_large_for_limit(what)
    raise rate_limited(what, allowance.wait_s)


def _span(seconds: float) -> str:
    """As OpenAI writes it: `250ms`, `12s`, `1m30s`."""
    if seconds < 1:
        return f"{int(seconds * 1000)}ms"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
