"""Rate limits of API keys, kept in Redis (`lua/limit*.lua`), so that all gateways of a cell share them.

Each limit is a token bucket that holds a minute's worth and refills evenly. A request takes one from the requests'
bucket as it begins, from the tokens' bucket what it may cost at most once that is known, and gives back at its end what
it did not use. Requests under way are held by name and time, so that those of a dead gateway free themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shared.api_keys import ApiKey
from shared.keys import Keys
from shared.redis_link import RedisLink
from shared.scripts import Scripts

HOLD_S = 30.0
"""A request under way that nobody renews for so long is forgotten."""
CHARGED = -1
"""To `leave`: the request cost what was charged."""

Limit = Literal["requests", "tokens", "concurrent"]
_LIMITS: dict[bytes, Limit | None] = {b"r": "requests", b"t": "tokens", b"c": "concurrent", b"": None}


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key had left when it was last looked at. A refusal has a `short`."""

    short: Limit | None
    wait_s: float | None  # until what was short may be there; None: never, it is more than the whole limit
    requests_left: int
    tokens_left: int
    requests_full_s: float
    tokens_full_s: float


class RateLimits:
    """The face of the script. Every method raises BusError once Redis was away for too long."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._scripts, self._keys = Scripts(link), keys

    async def enter(self, key: ApiKey, request: str) -> Allowance:
        """Begin a request, unless a limit is reached. Repeatable."""
        return await self._run("enter", key, 0, request)

    async def charge(self, key: ApiKey, request: str, num_tokens: int) -> Allowance:
        """Take what the request costs in tokens at most, unless so many are not there. Repeatable."""
        return await self._run("charge", key, num_tokens, request)

    async def leave(self, key: ApiKey, request: str, num_tokens: int) -> None:
        """The request is over, and cost so many tokens: the rest of the charge goes back. Repeatable."""
        await self._scripts.run("limit_leave", self._keys_of(key), [request, key.tokens_per_minute, num_tokens])

    async def renew(self, key: ApiKey, requests: Sequence[str]) -> None:
        """These are still under way."""
        await self._scripts.run("limit_renew", self._keys_of(key), [int(HOLD_S * 1000), *requests])

    def _keys_of(self, key: ApiKey) -> list[str]:
        return [self._keys.rate(key.id), self._keys.busy(key.id)]

    async def _run(self, op: str, key: ApiKey, num_tokens: int, request: str) -> Allowance:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent)
        answer = await self._scripts.run(
            "limit",
            self._keys_of(key),
            [op, *limits, int(HOLD_S * 1000), num_tokens, request],
        )
        granted, short, wait_ms, requests_left, tokens_left, requests_ms, tokens_ms = answer
        assert granted or short
        return Allowance(
            short=_LIMITS[short],
            wait_s=None if wait_ms < 0 else wait_ms / 1000,
            requests_left=requests_left,
            tokens_left=tokens_left,
            requests_full_s=requests_ms / 1000,
            tokens_full_s=tokens_ms / 1000,
        )
