"""Submissions served by a gateway over a scripted model and a real Redis: the same answers and refusals as HTTP, in
a result that goes on wherever it was left."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

from services.gateway import queue_job
from services.gateway.queue_job import MAX_TRIES
from shared.clock import SystemClock
from shared.config import RedisConfig
from shared.errors import BusError
from shared.messages import EpochRaised, Finished, Tokens
from shared.redis_link import RedisLink
from shared.submissions import ResultItem
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import answer
from tests.unit.gateway.queue_world import (
    CHAT,
    COMPLETION,
    CONFIG,
    KEYS,
    TEXT,
    PortAdmitter,
    Queue,
    joined,
    make_queue,
    other_gateway,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def queue(gateway: Gateway, redis_url: str) -> AsyncIterator[Queue]:
    link = RedisLink(RedisConfig(url=redis_url), SystemClock())
    yield make_queue(gateway, link)
    await link.close()


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)])
async def test_the_result_is_what_http_answers(queue: Queue, path: str, body: dict[str, Any]) -> None:
    """But for the response's id and time; and its tokens and text come one after another before it."""
    said = queue.gateway.ids(TEXT)
    queue.gateway.port.script = answer(said, num_cached_tokens=16)
    async with queue.gateway.client() as client:
        http = (await client.post(f"/v1/{path}", json=body)).json()
    async with queue.running():
        await queue.submit("a", body)
        parts, end = await queue.result("a")
    assert end["status"] == "200"
    result = json.loads(end["result"])
    assert {**http, "id": 0, "created": 0} == {**result, "id": 0, "created": 0}
    assert joined(parts) == (said, TEXT)
    first, second = queue.gateway.port.admitted
    assert first.token_ids == second.token_ids
    assert second.request_id == result["id"]


async def test_a_submission_is_on_the_account_that_it_names(queue: Queue) -> None:
    """Its request bears the tenant; a name that cannot be one is a dead letter."""
    queue.gateway.port.script = answer(queue.gateway.ids(TEXT))
    async with queue.running():
        await queue.submit("a", COMPLETION, tenant="acme")
        _, end = await queue.result("a")
        await queue.submit("b", COMPLETION, tenant="a tenant")
        _, refused = await queue.result("b")
    assert (end["status"], refused["status"]) == ("200", "400")
    assert [request.tenant for request in queue.gateway.port.admitted] == ["acme"]


BAD = [
    {"prompt": "hi", "temperature": 9},
    {"prompt": "hi", "n": 200},
    {"prompt": [], "max_tokens": 3},
    {"prompt": "hi", "model": "gpt-4"},
    {"prompt": [5] * 4000},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": []},
]


@pytest.mark.parametrize("body", BAD, ids=lambda body: "-".join(body))
async def test_a_bad_body_is_refused_as_over_http(queue: Queue, body: dict[str, Any]) -> None:
    """The same status and the same error object; the entry is gone, and it is no dead letter."""
    path = "chat/completions" if body.get("messages") else "completions"
    async with queue.gateway.client() as client:
        http = await client.post(f"/v1/{path}", json=body)
    async with queue.running():
        await queue.submit("a", body)
        parts, end = await queue.result("a")
    assert (int(end["status"]), json.loads(end["error"])) == (http.status_code, http.json())
    assert http.status_code in (400, 404)
    assert parts == []
    assert await queue.link.client.xlen(KEYS.submit()) == 0
    assert await queue.link.client.xlen(KEYS.dead()) == 0
    assert queue.ingress.counts().refused == 1


@pytest.mark.parametrize(
    ("text", "status"), [("{nope", 400), ("[1]", 400), ("", 400), ("\udcff", 400), ('"' + "x" * (1 << 20) + '"', 413)]
)
async def test_what_is_no_json_object_is_refused(queue: Queue, text: str, status: int) -> None:
    """Whatever the bytes."""
    async with queue.running():
        await queue.link.client.xadd(KEYS.submit(), {"id": "a", "request": text.encode("utf-8", "surrogateescape")})
        _, end = await queue.result("a")
    assert int(end["status"]) == status


async def test_the_endpoint_can_be_named(queue: Queue) -> None:
    """In the entry or in the body; by itself it is chat where there are messages. Another name is refused."""
    queue.gateway.port.script = answer([5])
    async with queue.running():
        await queue.submit("entry", CHAT, endpoint="completions")
        await queue.submit("body", {**CHAT, "endpoint": "completions"})
        await queue.submit("other", CHAT, endpoint="embeddings")
        for name in ("entry", "body"):
            _, end = await queue.result(name)
            assert json.loads(end["error"])["error"]["param"] == "prompt"
        _, end = await queue.result("other")
        assert json.loads(end["error"])["error"]["param"] == "endpoint"


async def test_an_entry_that_cannot_be_served_is_a_dead_letter_with_its_reason(queue: Queue) -> None:
    """Its result says so as well; the others are served."""
    queue.gateway.port.script = answer([5])
    async with queue.running():
        entry = (await queue.link.client.xadd(KEYS.submit(), {"id": "no good", "request": "{}"})).decode()
        await queue.submit("a", COMPLETION)
        _, end = await queue.result(entry)
        assert (await queue.result("a"))[1]["status"] == "200"
    assert end["status"] == "400"
    [(_, letter)] = await queue.link.client.xrange(KEYS.dead())
    assert b"id must have" in letter[b"reason"]
    assert letter[b"id"] == b"no good"


async def test_work_that_fails_for_good_is_a_dead_letter(queue: Queue) -> None:
    """The client sees no internals, the operator sees the reason."""
    queue.gateway.port.script = answer([5], reason="error", error="worker lost, 3 attempts")
    async with queue.running():
        await queue.submit("a", COMPLETION)
        _, end = await queue.result("a")
    assert end["status"] == "500"
    assert "worker lost" not in end["error"]
    [(_, letter)] = await queue.link.client.xrange(KEYS.dead())
    assert letter[b"reason"] == b"worker lost, 3 attempts"


@pytest.mark.parametrize("obstacle", ["full", "no worker", "bus"])
async def test_a_submission_waits_while_it_cannot_be_admitted(queue: Queue, obstacle: str) -> None:
    """It stays pending, is tried again, and is served once there is room."""
    port = queue.gateway.port
    port.script = answer([5])
    live, port.capacity, port.broken = port.live, 0 if obstacle == "full" else 10, obstacle == "bus"
    port.live = [] if obstacle == "no worker" else live
    async with queue.running():
        await queue.submit("a", COMPLETION)
        await queue.until(lambda: queue.ingress.counts().waits >= 3)
        assert await queue.link.client.xlen(KEYS.submit()) == 1
        assert await queue.link.client.exists(KEYS.result("a")) == 0
        port.live, port.capacity, port.broken = live, 10, False
        assert (await queue.result("a"))[1]["status"] == "200"
    assert port.cancelled == []


@pytest.mark.parametrize("where", ["entry", "body"])
async def test_a_deadline_ends_what_has_not_begun(queue: Queue, where: str) -> None:
    """An error instead of a late answer; nothing goes on upstream."""
    fields = {"deadline_ms": "300"} if where == "entry" else {}
    body = COMPLETION if where == "entry" else {**COMPLETION, "deadline_ms": 300}
    async with queue.running(ticking=False):
        await queue.submit("a", body, **fields)
        await queue.until(lambda: queue.gateway.port.admitted)
        queue.gateway.clock.advance(0.31)
        _, end = await queue.result("a")
    assert end["status"] == "504"
    assert json.loads(end["error"])["error"]["code"] == "deadline_exceeded"
    request_id = queue.gateway.port.admitted[0].request_id
    assert queue.gateway.port.cancelled == [(request_id, "deadline")]
    assert await queue.link.client.xlen(KEYS.dead()) == 0


async def test_a_deadline_means_nothing_after_the_first_token(queue: Queue) -> None:
    """It is the time in the queue."""
    port = queue.gateway.port
    port.script = lambda r: [Tokens(r.request_id, 1, 0, 0, (5,))]
    async with queue.running(ticking=False):
        await queue.submit("a", COMPLETION, deadline_ms="300")
        await queue.until_redis(lambda: queue.link.client.exists(KEYS.result("a")))
        queue.gateway.clock.advance(1.0)
        port.emit(Finished(port.admitted[0].request_id, 1, "stop", 1))
        _, end = await queue.result("a")
    assert end["status"] == "200"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("num_out", [0, 1, 3, 6, 100])
async def test_a_result_goes_on_where_another_gateway_left_it(queue: Queue, num_out: int, at_once: bool) -> None:
    """However many tokens are out: the whole is the same, no token twice, none missing, no character split."""
    said = queue.gateway.ids(TEXT)
    num_out = min(num_out, len(said))
    whole = lambda r: [Tokens(r.request_id, 1, 0, 0, tuple(said)), Finished(r.request_id, 1, "length", len(said))]  # noqa: E731
    queue.gateway.port.script = whole if at_once else answer(said)
    other = other_gateway(queue.link)
    await queue.submit("a", COMPLETION)
    (s,) = await other.read(1, 1)
    await other.open(s)
    detokenizer = queue.gateway.tokenizer.detokenizer()
    texts = [detokenizer.push(t) for t in said[:num_out]]
    for i, text in enumerate(texts):
        assert await other.write(s, [ResultItem(0, i, (said[i],), text, len("".join(texts[: i + 1])))]) == "out"
    await other.release([s], CONFIG.submission_lease_s)
    async with queue.running():
        parts, end = await queue.result("a")
    assert joined(parts) == (said, TEXT)
    assert json.loads(end["result"])["choices"][0]["text"] == TEXT
    assert json.loads(end["result"])["usage"]["completion_tokens"] == len(said)


async def test_several_prompts_are_one_submission(queue: Queue) -> None:
    """Each choice has offsets of its own; entry ids count the tokens of all."""
    queue.gateway.port.script = answer([5, 6])
    async with queue.running():
        await queue.submit("a", {"prompt": ["hi", "ho", "hu"], "max_tokens": 2})
        parts, end = await queue.result("a")
    for choice in "012":
        assert joined([p for p in parts if p["choice"] == choice])[0] == [5, 6]
    assert [c["index"] for c in json.loads(end["result"])["choices"]] == [0, 1, 2]
    assert len({r.sampling.seed for r in queue.gateway.port.admitted}) == 3


async def test_a_stop_string_ends_the_result_and_the_work(queue: Queue) -> None:
    """Cut before the stop string; no token beyond the one that completed it."""
    said = queue.gateway.ids(TEXT)
    queue.gateway.port.script = lambda r: [Tokens(r.request_id, 1, 0, i, (t,)) for i, t in enumerate(said)]
    async with queue.running():
        await queue.submit("a", {**COMPLETION, "stop": "END"})
        parts, end = await queue.result("a")
        await queue.gateway.port.cancel_seen.wait()
    choice = json.loads(end["result"])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT.partition("END")[0], "stop")
    tokens, text = joined(parts)
    assert text == choice["text"]
    assert len(tokens) == json.loads(end["result"])["usage"]["completion_tokens"] < len(said)


async def test_the_seed_is_the_submissions_own(queue: Queue) -> None:
    """Two gateways sample alike, two submissions do not, and a client's own seed counts."""
    port = queue.gateway.port
    async with queue.running():
        await queue.submit("a", COMPLETION)
        await queue.until(lambda: port.admitted)
    next_gateway = make_queue(queue.gateway, queue.link)
    port.script = answer([5])
    async with next_gateway.running():
        await queue.result("a")
        await queue.submit("b", COMPLETION)
        await queue.result("b")
        await queue.submit("c", {**COMPLETION, "seed": 11})
        await queue.result("c")
    first, second, b, c = [r.sampling.seed for r in port.admitted]
    assert first == second != b
    assert c == 11


async def test_work_that_somebody_cancelled_is_taken_up_again(queue: Queue) -> None:
    """Nobody but its client may end a submission; what was done about a gateway that was taken for dead does not."""
    port = queue.gateway.port
    port.script = answer([5], reason="cancelled")
    async with queue.running():
        await queue.submit("a", COMPLETION)
        await queue.until(lambda: len(port.admitted) >= 2)
        port.script = answer([5])
        _, end = await queue.result("a")
    assert end["status"] == "200"
    assert await queue.link.client.xlen(KEYS.dead()) == 0


async def test_an_attempt_that_never_gives_a_token_is_not_made_for_ever(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that breaks its gateway each time ends as a dead letter."""
    monkeypatch.setattr(queue_job, "log", structlog.wrap_logger(None, processors=[drop]))  # tracebacks take seconds

    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    queue.gateway.app.state.endpoints["completions"].prepare = broken
    async with queue.running():
        await queue.submit("a", COMPLETION)
        _, end = await queue.result("a")
    assert end["status"] == "500"
    assert queue.ingress.counts().restarts == MAX_TRIES
    [(_, letter)] = await queue.link.client.xrange(KEYS.dead())
    assert str(MAX_TRIES).encode() in letter[b"reason"]


def drop(*_: Any) -> Any:
    raise structlog.DropEvent


async def test_a_lost_redis_is_waited_for(queue: Queue) -> None:
    """Whichever call meets it."""
    queue.gateway.port.script = answer([5])
    for name in ("open", "adopt", "write", "end", "read", "claim", "renew"):
        real, failures = getattr(queue.submissions, name), 2

        async def flaky(*args: Any, real: Any = real) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise BusError("redis is away")
            return await real(*args)

        setattr(queue.submissions, name, flaky)
    async with queue.running():
        await queue.submit("a", COMPLETION)
        parts, end = await queue.result("a")
    assert end["status"] == "200"
    assert joined(parts)[0] == [5]


async def test_what_redis_has_forgotten_goes_on_from_its_result(queue: Queue) -> None:
    """Its record and its token log go some time after an end that its gateway did not live to write down: the next
    gateway admits it with the tokens that are out, above all epochs that it had."""
    said = queue.gateway.ids(TEXT)
    await queue.submit("a", {**COMPLETION, "n": 2})
    other = other_gateway(queue.link)
    (s,) = await other.read(10, 1)
    assert await other.open(s) is not None
    text = queue.gateway.app.state.parts.services.tokenizer.decode(said[:1])
    for choice in (1, 0):
        assert await other.write(s, [ResultItem(choice, 0, tuple(said[:1]), text, len(text))]) == "out"
    await other.release([s], CONFIG.submission_lease_s)
    port = queue.gateway.port
    port.logs_of = dict.fromkeys((0, 1), tuple(said[:1]))
    port.script = lambda r: [
        EpochRaised(r.request_id, 9, 1, (1,)),
        *(Tokens(r.request_id, 9, choice, i, (t,)) for choice in (0, 1) for i, t in enumerate(said) if i),
        Finished(r.request_id, 9, "length", len(said), others=(len(said),)),
    ]
    async with queue.running():
        parts, end = await queue.result("a")
    assert end["status"] == "200"
    for choice in "01":
        assert joined([p for p in parts if p["choice"] == choice]) == (said, TEXT)
    leases = queue.ingress._shared.leases
    assert isinstance(leases, PortAdmitter)
    [(epoch, outputs)] = leases.given
    assert epoch > 1
    assert outputs == [said[:1], said[:1]]
