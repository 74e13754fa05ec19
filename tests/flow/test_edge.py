"""Keys, tenants and ports of a real stack: as operators make keys and clients use them."""

import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.flow.stack import ROOT, Stack

pytestmark = pytest.mark.flow
PROMPT = list(range(100, 164))  # four blocks


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[Stack]:
    """One pair, with a salt for each tenant."""
    with Stack(model__path=tiny_model, engine__num_blocks=400, gateway__cache_salt="tenant") as running:
        yield running


def keys(stack: Stack, *arguments: str) -> str:
    """What `baton keys` prints."""
    command = [sys.executable, "-m", "services.cli", "keys", *arguments, "--redis-url", stack.redis.url]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def ask(stack: Stack, key: str, **body: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **body}
    return httpx.post(f"{stack.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_tenants_and_limits(stack: Stack) -> None:
    """From an open stack to a closed one; no hit across tenants; a flood that hits itself alone; a revoked key."""
    open_answer = ask(stack, "whatever")
    assert cached(open_answer) == 0
    acme, evil = keys(stack, "add", "acme"), keys(stack, "add", "evil", "--rpm", "5", "--concurrent", "2")
    stack.wait_until(lambda: ask(stack, "whatever").status_code == 401, "the gateway asks for keys")

    first = ask(stack, acme)
    assert cached(first) == 0, "a hit in what was asked without a key"
    stack.wait_until(lambda: cached(ask(stack, acme)) > 0, "a tenant hits its own prefixes")
    assert cached(ask(stack, evil)) == 0, "a hit across tenants"
    assert {r.json()["choices"][0]["text"] for r in (open_answer, first)} == {first.json()["choices"][0]["text"]}

    flood = [ask(stack, evil) for _ in range(30)]
    codes = [r.status_code for r in flood]
    assert codes.count(429) >= 20
    refused = next(r for r in flood if r.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-ratelimit-limit-requests"] == "5"
    assert [ask(stack, acme).status_code for _ in range(10)] == [200] * 10

    assert re.search(r"evil.*valid", keys(stack, "ls"))
    keys(stack, "revoke", evil.split("-")[1])
    stack.wait_until(lambda: ask(stack, evil).status_code == 401, "the revoked key is refused")
    assert ask(stack, acme).status_code == 200
    secrets = (acme.split("-")[2], evil.split("-")[2])
    logs = "".join(path.read_text() for path in stack.logs.iterdir())
    assert not any(secret in logs for secret in secrets)
    assert not any(secret in str(stack.redis_call("HGETALL", "{baton}:apikeys")) for secret in secrets)


def test_refusals_at_the_edge_are_the_clients_exceptions(stack: Stack) -> None:
    """401 without a valid key, 429 with the time to wait, which the client keeps to by itself, and no connection."""
    key = keys(stack, "add", "slow", "--rpm", "60")
    stack.wait_until(lambda: ask(stack, "whatever").status_code == 401, "the gateway asks for keys")
    asked: Any = {"model": "default", "prompt": PROMPT, "max_tokens": 1}
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as wrong:
            client.completions.create(**asked)
        assert wrong.value.code == "invalid_api_key"
        mine = client.with_options(api_key=key)
        with pytest.raises(openai.RateLimitError) as limited:
            deque((mine.completions.create(**asked) for _ in range(200)), maxlen=0)
        headers = limited.value.response.headers
        assert (limited.value.code, headers["retry-after"]) == ("rate_limit_exceeded", "1")
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("60", "0")
        assert headers["x-request-id"] == limited.value.request_id
        answer = mine.with_options(max_retries=3).completions.with_raw_response.create(**asked)
        assert answer.retries_taken >= 1
        assert int(answer.headers["x-ratelimit-limit-requests"]) == 60
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as nobody:
        with pytest.raises(openai.APIConnectionError):
            nobody.models.list()


def test_the_public_port_has_no_metrics(stack: Stack) -> None:
    """They are on the internal one, and so is /debug."""
    internal = stack._specs["gateway"].ready.removesuffix("/ready")
    for path in ("/metrics", "/debug"):
        assert httpx.get(stack.url + path).status_code in (401, 404)
        assert httpx.get(internal + path).status_code == 200
    assert "open_requests" in httpx.get(internal + "/debug").json()
    assert httpx.get(internal + "/v1/models").status_code == 404
    assert httpx.get(f"{stack.url}/ready").status_code == 200


def test_the_dashboard_shows_metrics_that_exist(stack: Stack) -> None:
    """Every name in its queries is one that a service exports."""
    board = json.loads((ROOT / "deploy/grafana/dashboards/baton.json").read_text())
    queries = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    wanted = set(re.findall(r"baton_\w+", queries))
    texts = [httpx.get(s.ready.removesuffix("/ready") + "/metrics").text for s in stack._specs.values()]
    known = set(re.findall(r"^(baton_\w+)", "\n".join(texts), re.M))
    assert wanted <= known, wanted - known
