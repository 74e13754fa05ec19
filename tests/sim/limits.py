"""The limits of a key as a model: what the `limit*.lua` scripts must answer, in plain Python.

Written from the contract in `shared/rate_limits.py`: two token buckets that hold a minute's worth and refill evenly,
and the requests under way, each with a deadline.
"""

import math
from dataclasses import dataclass, field

MINUTE_MS = 60_000


def kept(value: float) -> float:
    """As Redis keeps it: Lua writes 14 digits."""
    return float(f"{value:.14g}")


@dataclass
class Bucket:
    """Refills evenly; a limit of 0 is none, and such a bucket is always empty and never short."""

    limit: int
    left: float
    at_ms: int | None = None  # of the last refill

    def refill(self, now_ms: int) -> None:
        """Time that was set back refills nothing, and takes nothing away."""
        since_ms = max(0, now_ms - self.at_ms) if self.at_ms is not None else 0
        self.left = min(float(self.limit), self.left + since_ms * self.limit / MINUTE_MS)
        self.at_ms = now_ms

    def wait_ms(self, amount: float) -> int:
        """Until so much is there: 0 it is, -1 never."""
        if self.limit == 0 or self.left >= amount:
            return 0
        return -1 if amount > self.limit else math.ceil((amount - self.left) * MINUTE_MS / self.limit)

    @property
    def full_ms(self) -> int:
        return 0 if self.limit == 0 else math.ceil((self.limit - self.left) * MINUTE_MS / self.limit)


@dataclass
class Limits:
    """One key's. `now_ms` is Redis' time, and is moved by whoever tests."""

    requests_per_minute: int
    tokens_per_minute: int
    max_concurrent: int
    hold_ms: int
    now_ms: int
    busy: dict[str, int] = field(default_factory=dict)  # request -> deadline
    charged: dict[str, int] = field(default_factory=dict)
    requests: Bucket = field(init=False)
    tokens: Bucket = field(init=False)

    def __post_init__(self) -> None:
        self.requests = Bucket(self.requests_per_minute, self.requests_per_minute)
        self.tokens = Bucket(self.tokens_per_minute, self.tokens_per_minute)

    def enter(self, request: str) -> list[object]:
        """A request begins; again is a repeat and costs nothing."""
        self._look()
        if request in self.busy:
            return self._answer(1, "", 0)
        if wait := self.requests.wait_ms(1):
            return self._answer(0, "r", wait)
        if wait := self.tokens.wait_ms(min(1, self.tokens_per_minute)):
            return self._answer(0, "t", wait)
        if 0 < self.max_concurrent <= len(self.busy):
            return self._answer(0, "c", 1000)
        self.requests.left = max(0.0, self.requests.left - 1)
        self.busy[request] = self.now_ms + self.hold_ms
        return self._answer(1, "", 0)

    def charge(self, request: str, tokens: int) -> list[object]:
        """It may cost so many in all: only the difference to what it was charged is taken."""
        self._look()
        more = tokens - self.charged.get(request, 0)
        if wait := self.tokens.wait_ms(more):
            return self._answer(0, "t", wait)
        self.tokens.left = max(0.0, self.tokens.left - more)
        self.charged[request] = tokens
        self.busy[request] = self.now_ms + self.hold_ms
        return self._answer(1, "", 0)

    def leave(self, request: str, tokens: int) -> int:
        """It is over and cost so many (-1: what it was charged): the rest goes back, once."""
        charged, was_busy = self.charged.pop(request, None), self.busy.pop(request, None) is not None
        if not was_busy or charged is None or tokens < 0:
            return 0
        self.tokens.left = kept(min(float(self.tokens_per_minute), self.tokens.left + charged - tokens))
        return 1

    def renew(self, *requests: str) -> int:
        """They are under way; whose time is over is not revived."""
        for request in requests:
            if self.busy.get(request, 0) > self.now_ms:
                self.busy[request] = self.now_ms + self.hold_ms
        return 1

    def _look(self) -> None:
        """Who was not renewed in time is gone, without a refund."""
        for request in [one for one, deadline in self.busy.items() if deadline <= self.now_ms]:
            del self.busy[request]
            self.charged.pop(request, None)
        for bucket in (self.requests, self.tokens):
            bucket.refill(self.now_ms)

    def _answer(self, granted: int, short: str, wait_ms: int) -> list[object]:
        left = [max(0, math.floor(bucket.left)) for bucket in (self.requests, self.tokens)]
        full = [bucket.full_ms for bucket in (self.requests, self.tokens)]
        for bucket in (self.requests, self.tokens):
            bucket.left = kept(bucket.left)
        return [granted, short.encode(), wait_ms, *left, *full]
