"""What a cell does at its limits: Redis full, nobody to dispatch, a gateway that is to go."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from shared.keys import Keys
from tests.flow.stack import Stack
from tests.oracle.oracle import Oracle, first_difference

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]
PROMPT = "the ship and the storm of the long night " * 4
NUM_TOKENS = 800


@pytest.fixture(scope="module")
def cell(tiny_model: Path) -> Iterator[Stack]:
    """Aggregated. A gateway that is silent for 3 s is buried."""
    settings = {"lease__heartbeat_s": 0.3, "lease__lease_s": 2.0, "gateway__queue_timeout_s": 5.0}
    with Stack(prefill=0, decode=1, model__path=tiny_model, engine__num_blocks=400, **settings) as stack:
        yield stack


def stream(stack: Stack, prompt: str, on_text: Callable[[int], None]) -> tuple[int, ...]:
    """The token log of a streamed answer that ended as it should; `on_text(n)` after its n-th event with text."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    events, num_texts = [], 0
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=120, trust_env=False) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                assert "error" not in events[-1], events[-1]
                if events[-1]["choices"][0]["text"]:
                    num_texts += 1
                    on_text(num_texts)
        assert line == "" or line == "data: [DONE]"
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return stack.token_log(events[0]["id"])


def ask(stack: Stack, max_tokens: int = 4) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": max_tokens}
    return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60, trust_env=False)


def refusal(reply: httpx.Response) -> tuple[int, str]:
    assert int(reply.headers["retry-after"]) > 0
    return reply.status_code, reply.json()["error"]["code"]


def test_a_full_redis_refuses_what_is_new_and_loses_nothing(cell: Stack, tiny_oracle: Oracle) -> None:
    """503 over HTTP, an error to an XADD; a stream that runs goes on to its end; then all is as before."""
    refused: list[tuple[int, str]] = []

    def fill(n: int) -> None:
        if n == 5:
            cell.redis_call("CONFIG", "SET", "maxmemory", 1)
            refused.append(refusal(ask(cell)))
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                cell.redis_call("XADD", Keys("baton").submit(), "*", "request", "{}")

    try:
        tokens = stream(cell, PROMPT, fill)
    finally:
        cell.redis_call("CONFIG", "SET", "maxmemory", 0)
    assert refused == [(503, "unavailable")]
    assert first_difference(tiny_oracle.greedy(tiny_oracle.encode(PROMPT), NUM_TOKENS), tokens) is None
    assert ask(cell).status_code == 200
    cell.wait_until(lambda: cell.metrics("gateway")["gateway_redis_used_bytes"] > 0, "Redis' memory is a metric")
    cell.wait_idle()


def test_a_request_that_waits_too_long_for_dispatch_is_refused(cell: Stack) -> None:
    """The scheduler stands still: a clear 503, and nothing is worked on when it moves again."""
    cell.signal("scheduler", signal.SIGSTOP)
    try:
        assert refusal(ask(cell)) == (503, "queue_timeout")
    finally:
        cell.signal("scheduler", signal.SIGCONT)
    cell.wait_idle()
    assert ask(cell).status_code == 200
    cell.wait_idle()


def test_a_gateway_that_is_to_go_stays_until_its_answers_are_whole(cell: Stack, tiny_oracle: Oracle) -> None:
    """SIGTERM; then its worker dies, so that the answer takes longer than a silent gateway is suffered; exit code 0."""
    prompt = PROMPT + "to the end "

    def drain(n: int) -> None:
        if n == 5:
            cell.signal("gateway", signal.SIGTERM)
            cell.kill("decode-0")
            threading.Timer(3.0, cell.start, ("decode-0",)).start()

    tokens = stream(cell, prompt, drain)
    assert first_difference(tiny_oracle.greedy(tiny_oracle.encode(prompt), NUM_TOKENS), tokens) is None
    assert cell.wait("gateway") == 0
    with pytest.raises(httpx.ConnectError):
        ask(cell)
    cell.start("gateway")
    cell.wait_ready()
    cell.wait_idle()
