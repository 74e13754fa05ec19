"""API keys: who may ask, on whose account, and how much. Redis keeps a digest of each key's secret, never the key.

A key is `baton-<id>-<secret>`: the id finds the record, and the secret, 256 random bits, is compared by its SHA-256 in
constant time. A slow hash would add nothing: there is no dictionary of such secrets. A revoked key's record stays, so
that a cell which ever had a key stays closed.
"""

import hmac
import re
from hashlib import sha256

import msgspec

from shared.clock import Clock
from shared.keys import Keys
from shared.randomness import Randomness
from shared.redis_link import RedisLink

TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"baton-([0-9a-f]{12})-([0-9a-f]{64})")
_NO_DIGEST = sha256(b"no key").hexdigest()


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis knows of a key. A limit of 0 is none."""

    id: str
    digest: str  # SHA-256 of the secret, hex
    tenant: str
    name: str = ""  # for people
    created_at: float = 0.0  # seconds since the epoch
    revoked: bool = False
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # prompt and answer together
    max_concurrent: int = 0  # requests under way at once

    @property
    def limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ApiKey).decode


class ApiKeys:
    """The keys of a cell. Every method raises BusError once Redis was away for too long."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link, self._key = link, keys.api_keys()

    async def add(self, draft: ApiKey, clock: Clock, randomness: Randomness) -> tuple[str, ApiKey]:
        """Make a key like `draft`, with an id, digest and time of its own: the key's text, which nobody can show again,
        and its record."""
        key_id, secret = randomness.token(6), randomness.token(32)
        record = msgspec.structs.replace(draft, id=key_id, digest=_digest(secret), created_at=clock.wall())
        await self._link.call(lambda: self._link.client.hset(self._key, key_id, _encode(record)))
        return f"baton-{key_id}-{secret}", record

    async def any(self) -> bool:
        """Whether the cell has, or ever had, a key."""
        return bool(await self._link.call(lambda: self._link.client.hlen(self._key)))

    async def all(self) -> list[ApiKey]:
        """Every record, oldest first."""
        raw = await self._link.call(lambda: self._link.client.hvals(self._key))
        return sorted(map(_decode, raw), key=lambda record: record.created_at)

    async def get(self, key_id: str) -> ApiKey | None:
        raw = await self._link.call(lambda: self._link.client.hget(self._key, key_id))
        return None if raw is None else _decode(raw)

    async def revoke(self, key_id: str) -> bool:
        """Refuse the key from now on. False: there is none of that id."""
        record = await self.get(key_id)
        if record is None:
            return False
        revoked = _encode(msgspec.structs.replace(record, revoked=True))
        await self._link.call(lambda: self._link.client.hset(self._key, key_id, revoked))
        return True


def split(text: str) -> tuple[str, str] | None:
    """(id, secret) of a key's text; None if it cannot be one."""
    found = _KEY.fullmatch(text)
    return (found[1], found[2]) if found else None


def opens(record: ApiKey | None, secret: str) -> bool:
    """Whether `secret` is the record's, and the record still holds. Takes as long whatever is wrong."""
    same = hmac.compare_digest(_digest(secret), _NO_DIGEST if record is None else record.digest)
    return same and record is not None and not record.revoked


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
