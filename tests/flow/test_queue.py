"""Submissions through Redis: answered once, whatever dies meanwhile."""

import contextlib
import io
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.keys import Keys
from tests.flow.stack import ROOT, Stack
from tests.oracle.oracle import Greedy, Oracle, first_difference
from tests.redis_server import find_binary

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]
KEYS = Keys("baton")
NUM_SUBMISSIONS = 200
PROMPTS = [f"{i} the keeper of the light and the storm " * (1 + i % 5) for i in range(20)]
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def queue(tiny_model: Path) -> Iterator[Stack]:
    """A cell whose queue is short, so that submissions wait for room, and whose gateways are missed soon."""
    settings = {"gateway__max_queued": 48, "gateway__submission_lease_s": 1.5, "lease__lease_s": 3.0}
    with Stack(prefill=1, decode=1, model__path=tiny_model, engine__num_blocks=600, **settings) as stack:
        yield stack


def example(language: str, stack: Stack) -> str:
    """The README's example of a client of the queue, as it stands but for the place of the socket."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (found,) = [block for block in blocks if ":submit" in block]
    assert ".run/8000/sockets/redis.sock" in found
    return found.replace(".run/8000/sockets/redis.sock", str(stack.redis.socket))


def submit(client: "redis.Redis[str]", name: str, body: dict[str, Any], **fields: Any) -> None:
    """As a client does that was not told whether its entry arrived: until Redis says so."""
    deadline = time.monotonic() + 30
    while True:
        try:
            client.xadd(KEYS.submit(), {"id": name, "request": json.dumps(body), **fields})
            return
        except redis.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def body(i: int) -> dict[str, Any]:
    shape = random.Random(i)
    return {
        "prompt": PROMPTS[i % len(PROMPTS)],
        "max_tokens": shape.randint(4, MAX_TOKENS),
        "temperature": 0,
        "ignore_eos": True,
    }


def num_ended(client: "redis.Redis[str]") -> int:
    """Results with an end, as far as Redis answers."""
    try:
        pipe = client.pipeline(transaction=False)
        for i in range(NUM_SUBMISSIONS):
            pipe.xrevrange(KEYS.result(f"job-{i}"), count=1)
        return sum(1 for last in pipe.execute() if last and "status" in last[0][1])
    except redis.ConnectionError:
        return 0


def read_result(client: "redis.Redis[str]", name: str, offset: int = 0) -> tuple[tuple[int, ...], str, dict[str, str]]:
    """(tokens from `offset` on, their text, the end), checked: every index once and in order, one end."""
    [(_, entries)] = client.xread({KEYS.result(name): offset})
    *parts, (_, end) = entries
    assert "status" in end, entries
    tokens: list[int] = []
    for _, part in parts:
        assert int(part["offset"]) == offset + len(tokens), entries
        tokens += json.loads(part["tokens"])
    return tuple(tokens), "".join(part["text"] for _, part in parts), end


def test_two_hundred_submissions_outlive_their_gateway_and_redis(queue: Stack, tiny_oracle: Oracle) -> None:
    """SIGKILL of the gateway, then of Redis, in the middle: each is answered exactly once, with the oracle's tokens."""

    def want(prompt: str) -> Greedy:
        return tiny_oracle.greedy(tiny_oracle.encode(prompt), MAX_TOKENS)

    client = redis.Redis.from_url(queue.redis.url, decode_responses=True)
    for i in range(NUM_SUBMISSIONS // 2):
        submit(client, f"job-{i}", body(i), reply=KEYS.replies("all"))
    queue.wait_until(lambda: num_ended(client) > 20, "the first answers", 60)
    queue.kill("gateway")
    assert num_ended(client) < NUM_SUBMISSIONS // 2, "the gateway was killed too late"
    for i in range(NUM_SUBMISSIONS // 2, NUM_SUBMISSIONS):
        submit(client, f"job-{i}", body(i), reply=KEYS.replies("all"))
        submit(client, f"job-{i % 50}", {"prompt": "another"})
    queue.start("gateway")
    queue.wait_until(lambda: num_ended(client) > NUM_SUBMISSIONS // 2, "the new gateway answers", 60)
    queue.redis.kill()
    queue.redis.start()
    assert num_ended(client) < NUM_SUBMISSIONS, "Redis was killed too late"
    queue.wait_until(lambda: num_ended(client) == NUM_SUBMISSIONS, "all answered", 120)
    for i in range(NUM_SUBMISSIONS):
        asked = body(i)
        tokens, text, end = read_result(client, f"job-{i}")
        assert end["status"] == "200", end
        greedy, n = want(asked["prompt"]), asked["max_tokens"]
        assert first_difference(Greedy(greedy.token_ids[:n], greedy.margins[:n]), tokens) is None
        choice = json.loads(end["result"])["choices"][0]
        assert choice["text"] == text == tiny_oracle.decode(list(tokens))
        assert choice["finish_reason"] == "length"
        assert json.loads(end["result"])["usage"]["completion_tokens"] == n
    mirrored = [entry for _, entry in client.xrange(KEYS.replies("all")) if "status" in entry]
    assert sorted(entry["id"] for entry in mirrored) == sorted(f"job-{i}" for i in range(NUM_SUBMISSIONS))
    queue.wait_until(lambda: client.xlen(KEYS.submit()) == 0, "every entry acknowledged")
    assert client.xlen(KEYS.dead()) == 0
    figures = queue.metrics("gateway")
    assert figures["gateway_repaired_tokens_total"] > 0, "nothing was in the middle when the gateway died"
    assert figures["gateway_submissions_repeats_total"] > 0
    assert figures["gateway_submissions_waits_total"] > 0, "nothing had to wait for room"
    queue.wait_idle()
    client.close()


def test_the_readmes_python_client_prints_the_answer(queue: Stack) -> None:
    """Text as it comes, then the whole response; the same once more, from the middle."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names: dict[str, Any] = {}
        exec(example("python", queue), names)  # noqa: S102 - our own README
    answer = json.loads(names["answer"])
    text = answer["choices"][0]["message"]["content"]
    assert answer["object"] == "chat.completion"
    assert printed.getvalue().startswith(text)
    num_tokens = answer["usage"]["completion_tokens"]
    assert num_tokens > 2
    whole, _, _ = read_result(names["client"], "question-1")
    rest, _, end = read_result(names["client"], "question-1", num_tokens - 2)
    assert rest == whole[-2:]
    assert json.loads(end["result"]) == answer
    names["client"].close()


def test_the_readmes_redis_cli_client_prints_the_answer(queue: Stack) -> None:
    """In a plain shell."""
    path = f"{Path(find_binary()).parent}:{os.environ['PATH']}"
    out = subprocess.run(
        ["sh", "-c", example("sh", queue)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    *_, kind, answer = out.splitlines()
    assert kind == "result"
    assert json.loads(answer)["usage"]["completion_tokens"] <= 8


def test_the_streams_lengths_are_metrics(queue: Stack) -> None:
    """What Redis holds is seen: the dead letter here, and nothing waiting once all is done."""
    names = ("sched", "kv", "index", "submit", "dead", "tokens")
    queue.redis_call("XADD", KEYS.submit(), "*", "id", "bad one", "request", "{}")

    def settled() -> bool:
        values = queue.metrics("gateway")
        lengths = {name: values[f"gateway_stream_length_{name}"] for name in names}
        return lengths == dict.fromkeys(names, 0.0) | {"dead": 1.0} and values["gateway_submissions_dead_total"] == 1

    queue.wait_until(settled, "the dead letter is counted")
