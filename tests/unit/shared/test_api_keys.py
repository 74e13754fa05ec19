"""API keys and their limits, on a real Redis."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from shared.api_keys import ApiKey, ApiKeys, opens, split
from shared.clock import ManualClock, SystemClock
from shared.config import RedisConfig
from shared.keys import Keys
from shared.randomness import SystemRandomness
from shared.rate_limits import CHARGED, RateLimits
from shared.redis_link import RedisLink

pytestmark = pytest.mark.anyio


@dataclass
class Edge:
    keys: ApiKeys
    limits: RateLimits
    link: RedisLink
    names: Keys

    async def key(self, **limits: int) -> ApiKey:
        draft = ApiKey(id="", digest="", tenant="acme", **limits)
        return (await self.keys.add(draft, ManualClock(5.0), SystemRandomness()))[1]


@pytest.fixture
async def edge(redis_url: str) -> AsyncIterator[Edge]:
    link, names = RedisLink(RedisConfig(url=redis_url), SystemClock()), Keys("test")
    yield Edge(ApiKeys(link, names), RateLimits(link, names), link, names)
    await link.close()


async def test_redis_never_has_the_key(edge: Edge):
    """What is stored opens nothing; the key's text opens its record, and no other does."""
    draft = ApiKey(id="", digest="", tenant="acme", name="ci")
    text, record = await edge.keys.add(draft, ManualClock(5.0), SystemRandomness())
    other, _ = await edge.keys.add(draft, ManualClock(6.0), SystemRandomness())
    key_id, secret = split(text) or ("", "")
    stored = b"".join(await edge.link.client.hvals(edge.names.api_keys()))
    assert secret.encode() not in stored
    assert record.digest.encode() in stored
    found = await edge.keys.get(key_id)
    assert found == record
    assert opens(found, secret)
    assert not opens(found, (split(other) or ("", ""))[1])
    assert not opens(found, record.digest)
    assert not opens(None, secret)
    assert [k.id for k in await edge.keys.all()] == [key_id, (split(other) or ("", ""))[0]]


async def test_a_revoked_key_opens_nothing_and_the_cell_stays_closed(edge: Edge):
    """Its record stays."""
    assert not await edge.keys.any()
    text, record = await edge.keys.add(ApiKey(id="", digest="", tenant="a"), ManualClock(1.0), SystemRandomness())
    assert await edge.keys.revoke(record.id)
    assert not opens(await edge.keys.get(record.id), (split(text) or ("", ""))[1])
    assert await edge.keys.any()
    assert not await edge.keys.revoke("nobody")


@pytest.mark.parametrize("text", ["", "x", "baton-", "baton-0123456789ab-", "baton-0123456789AB-" + "0" * 64])
def test_what_cannot_be_a_key_is_no_question_for_redis(text: str):
    """Wrong alphabet, wrong length."""
    assert split(text) is None


async def test_requests_per_minute(edge: Edge):
    """A minute's worth at once, then a wait that is one request's share of a minute."""
    key = await edge.key(requests_per_minute=3)
    left = [(await edge.limits.enter(key, f"r{i}")).requests_left for i in range(3)]
    assert left == [2, 1, 0]
    refused = await edge.limits.enter(key, "r3")
    assert refused.short == "requests"
    assert refused.wait_s is not None
    assert 15 < refused.wait_s <= 20
    assert 55 < refused.requests_full_s <= 60


async def test_the_same_request_counts_once(edge: Edge):
    """A call whose answer was lost is sent again."""
    key = await edge.key(requests_per_minute=3, tokens_per_minute=100)
    for _ in range(3):
        assert (await edge.limits.enter(key, "r")).requests_left == 2
    for _ in range(3):
        assert (await edge.limits.charge(key, "r", 60)).tokens_left in (40, 41)
    for _ in range(3):
        await edge.limits.leave(key, "r", 10)
    assert 90 <= (await edge.limits.enter(key, "s")).tokens_left <= 93


async def test_tokens_are_charged_at_most_and_settled_at_the_end(edge: Edge):
    """What was not used comes back; what cannot ever be is told apart from what is not there now."""
    key = await edge.key(tokens_per_minute=1000)
    await edge.limits.enter(key, "a")
    assert (await edge.limits.charge(key, "a", 900)).short is None
    await edge.limits.enter(key, "b")
    refused = await edge.limits.charge(key, "b", 500)
    assert refused.short == "tokens"
    assert refused.wait_s is not None
    assert 20 < refused.wait_s <= 24
    assert (await edge.limits.charge(key, "b", 1001)).wait_s is None
    await edge.limits.leave(key, "a", 100)
    assert (await edge.limits.charge(key, "b", 500)).short is None
    await edge.limits.leave(key, "b", CHARGED)
    assert 400 <= (await edge.limits.enter(key, "c")).tokens_left <= 420


async def test_requests_at_once(edge: Edge):
    """A place is free when its request leaves, and only then."""
    key = await edge.key(max_concurrent=2)
    assert [(await edge.limits.enter(key, r)).short for r in "abc"] == [None, None, "concurrent"]
    await edge.limits.renew(key, ["a", "b", "never-entered"])
    assert (await edge.limits.enter(key, "c")).short == "concurrent"
    await edge.limits.leave(key, "a", CHARGED)
    assert [(await edge.limits.enter(key, r)).short for r in "cd"] == [None, "concurrent"]


async def test_a_dead_gateways_requests_free_their_places(edge: Edge):
    """Nobody renews them."""
    key = await edge.key(max_concurrent=1)
    await edge.limits.enter(key, "dead")
    await edge.link.client.zadd(edge.names.busy(key.id), {"dead": 1})  # its deadline is long past
    assert (await edge.limits.enter(key, "alive")).short is None
    assert await edge.link.client.zrange(edge.names.busy(key.id), 0, -1) == [b"alive"]


async def test_one_keys_flood_is_not_anothers(edge: Edge):
    """Buckets are per key."""
    flood, calm = await edge.key(requests_per_minute=5), await edge.key(requests_per_minute=5)
    answers = [(await edge.limits.enter(flood, f"f{i}")).short for i in range(50)]
    assert answers[:5] == [None] * 5
    assert set(answers[5:]) == {"requests"}
    assert [(await edge.limits.enter(calm, f"c{i}")).short for i in range(5)] == [None] * 5


async def test_limits_leave_nothing_behind_for_ever(edge: Edge):
    """Both keys expire."""
    key = await edge.key(requests_per_minute=5)
    await edge.limits.enter(key, "r")
    for name in (edge.names.rate(key.id), edge.names.busy(key.id)):
        assert await edge.link.client.pttl(name) > 0
