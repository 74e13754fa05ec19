"""Keys, tenants, limits, request ids and CORS, as a client meets them."""

import json
from dataclasses import dataclass, field, replace
from hashlib import sha256

import httpx
import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from services.gateway.app import build_app
from services.gateway.gate import FRESH_S, Gate
from services.gateway.grammar_check import ProcessGrammarChecker
from shared.api_keys import ApiKey
from shared.clock import ManualClock
from shared.config import GatewayConfig
from shared.errors import BusError
from shared.hashing import chain_root
from shared.ids import Incarnation
from shared.model_path import resolve
from shared.randomness import SeededRandomness
from shared.rate_limits import Allowance
from shared.tokenizer.tokenizer import Tokenizer
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import CountingOffload, FakePort, Recorder, answer

pytestmark = pytest.mark.anyio
FREE = Allowance(None, 0.0, 9, 900, 6.0, 0.25)
SECRETS = {"acme": "a" * 64, "evil": "b" * 64}


@dataclass
class Keys:
    """A key store in memory."""

    records: dict[str, ApiKey] = field(default_factory=dict)
    broken: bool = False
    reads: int = 0

    def add(self, key_id: str, tenant: str, **limits: int) -> dict[str, str]:
        digest = sha256(SECRETS[tenant].encode()).hexdigest()
        self.records[key_id] = ApiKey(id=key_id, digest=digest, tenant=tenant, **limits)
        return {"authorization": f"Bearer baton-{key_id}-{SECRETS[tenant]}"}

    async def any(self) -> bool:
        if self.broken:
            raise BusError("away")
        return bool(self.records)

    async def get(self, key_id: str) -> ApiKey | None:
        if self.broken:
            raise BusError("away")
        self.reads += 1
        return self.records.get(key_id)


@dataclass
class Limits:
    """Says what it is told to, and remembers."""

    enter_with: Allowance = FREE
    charge_with: Allowance = FREE
    calls: list[tuple[str, str, int]] = field(default_factory=list)

    async def enter(self, key: ApiKey, request: str) -> Allowance:
        self.calls.append(("enter", request, 0))
        return self.enter_with

    async def charge(self, key: ApiKey, request: str, num_tokens: int) -> Allowance:
        self.calls.append(("charge", request, num_tokens))
        return self.charge_with

    async def leave(self, key: ApiKey, request: str, num_tokens: int) -> None:
        self.calls.append(("leave", request, num_tokens))

    async def renew(self, key: ApiKey, requests: list[str]) -> None:
        self.calls += [("renew", request, 0) for request in requests]


@dataclass
class Guarded(Gateway):
    keys: Keys
    limits: Limits


def guarded(tokenizer: Tokenizer, **config: object) -> Guarded:
    port, clock, observer, offload = FakePort(), ManualClock(1000.0), Recorder(), CountingOffload()
    keys, limits = Keys(), Limits()
    settings = GatewayConfig(max_body_bytes=1 << 20, **config)  # type: ignore[arg-type]
    app = build_app(
        port=port,
        tokenizer=tokenizer,
        model_name="smol",
        incarnation=Incarnation("gw"),
        config=settings,
        clock=clock,
        randomness=SeededRandomness(7),
        offload=offload,
        observer=observer,
        grammars=ProcessGrammarChecker(resolve(""), timeout_s=5, max_bytes=1 << 16),
        gate=Gate(keys, limits, clock, settings.require_key),
    )
    port.script = answer([1, 2, 3])
    return Guarded(app, port, clock, observer, offload, tokenizer, keys, limits)


@pytest.fixture
def edge(tokenizer: Tokenizer, anyio_backend: str) -> Guarded:
    return guarded(tokenizer)


async def complete(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **body}, headers=headers)


async def test_without_keys_anyone_may_ask_and_with_one_nobody_else(edge: Guarded):
    """Closed from the first key on, within seconds, and for good."""
    async with edge.client() as client:
        assert (await complete(client)).status_code == 200
        good = edge.keys.add("0" * 12, "acme")
        edge.clock.advance(FRESH_S + 1)
        assert (await complete(client)).status_code == 401
        assert (await complete(client, good)).status_code == 200
        edge.keys.records.clear()  # a Redis that lost everything
        edge.clock.advance(FRESH_S + 1)
        assert (await complete(client)).status_code == 401
        assert (await complete(client, good)).status_code == 401


async def test_keys_can_be_asked_for_or_not_by_configuration(tokenizer: Tokenizer):
    """`on` before there is any, `off` although there are some."""
    closed, opened = guarded(tokenizer, require_key="on"), guarded(tokenizer, require_key="off")
    opened.keys.add("0" * 12, "acme")
    async with closed.client() as client:
        assert (await complete(client)).status_code == 401
    async with opened.client() as client:
        assert (await complete(client)).status_code == 200


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Basic abc"}, "invalid_api_key"),
        ({"authorization": "Bearer nonsense"}, "invalid_api_key"),
        ({"authorization": f"Bearer baton-{'0' * 12}-{'c' * 64}"}, "invalid_api_key"),
        ({"authorization": f"Bearer baton-{'9' * 12}-{'a' * 64}"}, "invalid_api_key"),
    ],
)
async def test_a_wrong_key_is_told_nothing(edge: Guarded, header: dict[str, str], code: str):
    """In OpenAI's shape, before the body is read, without a word on what is wrong with it."""
    edge.keys.add("0" * 12, "acme")
    async with edge.client() as client:
        response = await complete(client, header)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", code)
    assert not edge.port.admitted


async def test_every_path_is_guarded_but_what_tells_nothing(edge: Guarded):
    """Also the ones that are not there."""
    edge.keys.add("0" * 12, "acme")
    async with edge.client() as client:
        for path in ("/v1/models", "/v1/unknown", "/anything", "/metrics", "/debug"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401
        for path in ("/version", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path


async def test_a_revoked_key_is_refused_soon(edge: Guarded):
    """As soon as what the gateway knows of it is old; until then Redis is not asked again."""
    good = edge.keys.add("0" * 12, "acme")
    async with edge.client() as client:
        for _ in range(5):
            assert (await complete(client, good)).status_code == 200
        assert edge.keys.reads == 1
        edge.keys.records["0" * 12] = msgspec.structs.replace(edge.keys.records["0" * 12], revoked=True)
        edge.clock.advance(FRESH_S + 1)
        assert (await complete(client, good)).status_code == 401


async def test_without_redis_nobody_gets_in(edge: Guarded):
    """503, not an open door."""
    edge.keys.broken = True
    async with edge.client() as client:
        response = await complete(client)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert response.headers["retry-after"]


async def test_the_tenant_travels_with_the_request(edge: Guarded):
    """By the key, whatever the client says."""
    good = edge.keys.add("0" * 12, "acme")
    async with edge.client() as client:
        await complete(client, good, user="evil", tenant="evil")
    (request,) = edge.port.admitted
    assert request.tenant == "acme"
    assert request.root_hash == chain_root()


async def test_with_a_tenants_salt_no_two_tenants_share_a_hash(tokenizer: Tokenizer):
    """Not one block's; a tenant's own are the same again; a deployment's salt changes all."""
    edge = guarded(tokenizer, cache_salt="tenant")
    other = guarded(tokenizer, cache_salt="tenant", prefix_salt="x")
    headers = [edge.keys.add(key_id * 12, tenant) for key_id, tenant in (("0", "acme"), ("1", "evil"), ("2", "acme"))]
    other.keys.records = edge.keys.records
    prompt = list(range(100, 200))
    for gateway in (edge, other):
        async with gateway.client() as client:
            for header in headers:
                assert (await complete(client, header, prompt=prompt)).status_code == 200
    acme, evil, again = ({r.root_hash, *r.block_hashes} for r in edge.port.admitted)
    assert len(acme) == 1 + 100 // 16
    assert acme == again
    assert not acme & evil
    assert not acme & {h for r in other.port.admitted for h in (r.root_hash, *r.block_hashes)}


async def test_an_answer_says_what_is_left(edge: Guarded):
    """OpenAI's headers, for the limits that the key has."""
    good = edge.keys.add("0" * 12, "acme", requests_per_minute=10)
    async with edge.client() as client:
        headers = (await complete(client, good)).headers
        assert headers["x-ratelimit-limit-requests"] == "10"
        assert headers["x-ratelimit-remaining-requests"] == "9"
        assert headers["x-ratelimit-reset-requests"] == "6s"
        assert "x-ratelimit-limit-tokens" not in headers
        both = edge.keys.add("1" * 12, "acme", requests_per_minute=10, tokens_per_minute=1000)
        headers = (await complete(client, both)).headers
    assert (headers["x-ratelimit-remaining-tokens"], headers["x-ratelimit-reset-tokens"]) == ("900", "250ms")


async def test_too_many_at_once_says_so_in_headers(edge: Guarded):
    """A key with no other limit too."""
    good = edge.keys.add("0" * 12, "acme", max_concurrent=2)
    edge.limits.enter_with = replace(FREE, short="concurrent", wait_s=1.0)
    async with edge.client() as client:
        response = await complete(client, good)
    assert response.status_code == 429
    found = [response.headers[f"x-ratelimit-{kind}-concurrent"] for kind in ("limit", "remaining", "reset")]
    assert found == ["2", "0", "1s"]


async def test_a_reached_limit_is_429_with_a_time(edge: Guarded):
    """Before any work; and what limit it is."""
    good = edge.keys.add("0" * 12, "acme", requests_per_minute=10)
    edge.limits.enter_with = replace(FREE, short="requests", wait_s=5.2, requests_left=0)
    async with edge.client() as client:
        response = await complete(client, good)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "6"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert "10 requests per minute" in response.json()["error"]["message"]
    assert not edge.port.admitted


@pytest.mark.parametrize("wait_s", [3.0, None])
async def test_tokens_that_are_not_there(edge: Guarded, wait_s: float | None):
    """429 if they will be; 400 if the request asks for more than a whole minute has."""
    good = edge.keys.add("0" * 12, "acme", tokens_per_minute=10)
    edge.limits.charge_with = replace(FREE, short="tokens", wait_s=wait_s, tokens_left=0)
    async with edge.client() as client:
        response = await complete(client, good)
    assert response.status_code == (400 if wait_s is None else 429)
    assert response.headers.get("retry-after") == (None if wait_s is None else "3")
    assert [name for name, _, _ in edge.limits.calls] == ["enter", "charge", "leave"]
    assert not edge.port.admitted


async def test_a_request_is_charged_what_it_may_cost_and_settled_by_what_it_did(edge: Guarded):
    """Streamed and not; refused by the queue, it costs nothing."""
    good = edge.keys.add("0" * 12, "acme", tokens_per_minute=1000)
    prompt = len(edge.ids("hi"))
    async with edge.client() as client:
        for stream in (False, True):
            edge.limits.calls.clear()
            assert (await complete(client, good, max_tokens=50, stream=stream)).status_code == 200
            (_, a, _), (_, b, charged), (_, c, used) = edge.limits.calls
            assert a == b == c
            assert (charged, used) == (prompt + 50, prompt + 3)
        edge.limits.calls.clear()
        edge.port.capacity = 0
        assert (await complete(client, good)).status_code == 429
    assert edge.limits.calls[-1][0] == "leave"
    assert edge.limits.calls[-1][2] == 0


async def test_looking_is_not_work(edge: Guarded):
    """GET does not count."""
    good = edge.keys.add("0" * 12, "acme", requests_per_minute=1)
    async with edge.client() as client:
        assert (await client.get("/v1/models", headers=good)).status_code == 200
    assert not edge.limits.calls


async def test_a_request_id_is_echoed_or_made(edge: Guarded):
    """In every answer, refusals included; what could break a log line or a header is not repeated."""
    async with edge.client() as client:
        mine = await complete(client, {"x-request-id": "job-17/3"})
        refused = await complete(client, {"x-request-id": "job-18"}, temperature=-1)
        made = [
            (await complete(client, {"x-request-id": odd})).headers["x-request-id"] for odd in ("", "a b", "x" * 200)
        ]
    assert mine.headers["x-request-id"] == "job-17/3"
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "job-18")
    assert all(value.startswith("req-") for value in made)
    assert len(set(made)) == 3


async def test_the_request_id_and_no_secret_is_in_the_logs(edge: Guarded, capsys: pytest.CaptureFixture[str]):
    """All that is logged of a request with a key, a prompt and a wrong key."""
    good = edge.keys.add("0" * 12, "acme")
    with capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        async with edge.client() as client:
            await complete(client, {**good, "x-request-id": "job-17"}, prompt="the secret plan")
            await complete(client, {"authorization": f"Bearer baton-{'0' * 12}-{'c' * 64}"})
            edge.port.script = answer([1], reason="error", error="it broke")
            await complete(client, good)
    finished = [entry for entry in logs if entry["event"] == "finished"]
    assert finished[0]["x_request_id"] == "job-17"
    text = json.dumps(logs, default=repr) + capsys.readouterr().out
    for secret in (*SECRETS.values(), "c" * 64, "the secret plan"):
        assert secret not in text


async def test_cors_is_off_unless_asked_for(tokenizer: Tokenizer):
    """A page's preflight needs no key; its answer, a refusal too, is readable by that page alone."""
    origin = {"origin": "https://app.example"}
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    closed = guarded(tokenizer)
    async with closed.client() as client:
        assert "access-control-allow-origin" not in (await complete(client, origin)).headers
    opened = guarded(tokenizer, cors_origins=("https://app.example",), require_key="on")
    async with opened.client() as client:
        asked = await client.options("/v1/completions", headers=preflight)
        refused = await complete(client, origin)
        other = await complete(client, {"origin": "https://evil.example"})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in other.headers


async def test_a_prompt_limit_of_the_server(tokenizer: Tokenizer):
    """Below the model's."""
    edge = guarded(tokenizer, max_prompt_tokens=10)
    async with edge.client() as client:
        assert (await complete(client, prompt=[5] * 10)).status_code == 200
        response = await complete(client, prompt=[5] * 11)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_too_long")
