"""Choices, log-probabilities, echo and how text looks: a scripted model, the shapes of OpenAI's API."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from services.gateway.generation import RETELL_S
from services.gateway.prepare import MAX_PROMPT_LOGPROBS
from shared.ids import RequestId
from shared.messages import EpochRaised, Finished, GatewayMsg, GenerateRequest, TokenLogprobs, Tokens
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import Script

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def told(token: int, num_top: int) -> TokenLogprobs:
    """Something for each token: itself at -0.5, and the tokens after it."""
    return TokenLogprobs(-0.5 - token / 1e6, 2, tuple((token + 1 + i, -0.25 - i) for i in range(num_top)))


def say(*texts: Sequence[int]) -> Script:
    """A model whose choice c says `texts[c]`, a token of each choice at a time, with what is told of them if asked."""

    def script(request: GenerateRequest) -> list[GatewayMsg]:
        asked, r = request.sampling, request.request_id
        prompt = (
            tuple(told(t, asked.prompt_logprobs) for t in request.token_ids[1:])
            if asked.prompt_logprobs is not None
            else ()
        )
        events: list[GatewayMsg] = []
        said = [texts[c % len(texts)][: asked.max_tokens] for c in range(request.num_choices)]
        for i in range(max(map(len, said))):
            for c, tokens in enumerate(said):
                if i < len(tokens):
                    own = () if asked.logprobs is None else (told(tokens[i], asked.logprobs),)
                    events.append(Tokens(r, 1, c, i, (tokens[i],), 0, own, () if c or i else prompt))
        counts = [len(tokens) for tokens in said]
        reason = "stop" if said[0][-1] in asked.stop_token_ids else "length"
        return [*events, Finished(r, 1, reason, counts[0], 0, "", tuple(counts[1:]))]

    return script


async def ask(client: httpx.AsyncClient, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    prompt = {"prompt": "hi you"} if path == COMPLETIONS else {"messages": USER}
    response = await client.post(path, json=prompt | body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, path: str = COMPLETIONS, **body: Any) -> list[Any]:
    prompt = {"prompt": "hi you"} if path == COMPLETIONS else {"messages": USER}
    response = await client.post(path, json=prompt | body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_every_parameter_reaches_the_workers(gateway: Gateway) -> None:
    """As it was sent; the model's end tokens beside the client's."""
    gateway.port.script = say([5])
    body = {
        "n": 3,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -100, "9": 1.5},
        "min_tokens": 4,
        "stop_token_ids": [11, 12],
        "logprobs": 3,
        "prompt_logprobs": 2,
        "priority": -2,
        "user": "somebody",
        "metadata": {"a": "b"},
    }
    async with gateway.client() as client:
        await ask(client, **body)
    (request,) = gateway.port.admitted
    s = request.sampling
    assert (request.num_choices, request.priority) == (3, -2)
    assert (s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.1, 0.5, -0.5, 1.2)
    assert s.logit_bias == ((7, -100.0), (9, 1.5))
    assert (s.min_tokens, s.stop_token_ids) == (4, (*gateway.tokenizer.end_token_ids, 11, 12))
    assert (s.logprobs, s.prompt_logprobs) == (3, 2)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_choices_of_one_request(gateway: Gateway, path: str) -> None:
    """Three texts of different lengths, whole and streamed; each with its own reason; one request admitted."""
    texts = ["one", "two and a half", "three of them"]
    ids = [gateway.ids(text) for text in texts]
    end = gateway.tokenizer.end_token_ids[0]
    gateway.port.script = say(ids[0], [*ids[1], end], ids[2])
    limit = max(map(len, ids)) + 1
    async with gateway.client() as client:
        body = await ask(client, path, n=3, max_tokens=limit)
        parts = await stream(client, path, n=3, max_tokens=limit)
    assert len(gateway.port.admitted) == 2
    whole = [c["text"] if path == COMPLETIONS else c["message"]["content"] for c in body["choices"]]
    assert whole == texts
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["choices"][1]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == sum(map(len, ids)) + 1
    joined, reasons = ["", "", ""], ["", "", ""]
    for choice in (c for part in parts for c in part["choices"]):
        text = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        joined[choice["index"]] += text
        reasons[choice["index"]] += choice["finish_reason"] or ""
    assert joined == texts
    assert reasons == [c["finish_reason"] for c in body["choices"]]


async def test_several_prompts_with_several_choices(gateway: Gateway) -> None:
    """Choices of the first prompt first."""
    gateway.port.script = say(gateway.ids("a"), gateway.ids("b"))
    async with gateway.client() as client:
        body = await ask(client, prompt=["x", "y"], n=2, max_tokens=1)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]


async def test_a_stop_string_ends_its_own_choice(gateway: Gateway) -> None:
    """The other goes on; the work is cancelled as soon as both have ended."""
    gateway.port.script = say(gateway.ids("yes STOP no more"), gateway.ids("no end in sight here"))
    async with gateway.client() as client:
        body = await ask(client, n=2, stop=" STOP", max_tokens=20)
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [
        ("yes", "stop"),
        ("no end in sight here", "length"),
    ]


@asynccontextmanager
async def one_of_two_is_cut(gateway: Gateway) -> AsyncIterator[tuple[RequestId, list[int], list[int]]]:
    """A request for two choices, the first of which a stop string ends with its fourth token. Three of it and one of
    the other are there. -> the request, the tokens of both; it must be finished in here."""
    cut, other = gateway.ids("yes STOP no more"), gateway.ids("no end in sight here")
    async with gateway.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(ask, client, n=2, stop=" STOP", max_tokens=20))
        await gateway.port.admit_seen.wait()
        r = gateway.port.admitted[0].request_id
        gateway.port.emit(Tokens(r, 1, 0, 0, tuple(cut[:3])), Tokens(r, 1, 1, 0, tuple(other[:1])))
        await anyio.wait_all_tasks_blocked()
        yield r, cut, other


async def test_the_worker_is_told_of_a_choice_that_is_cut(gateway: Gateway) -> None:
    """Once, while the other goes on; the worker of a later epoch again, when it goes on with that choice."""
    async with one_of_two_is_cut(gateway) as (r, cut, other):
        gateway.port.emit(Tokens(r, 1, 0, 3, tuple(cut[3:4])), Tokens(r, 1, 1, 1, tuple(other[1:2])))
        await anyio.wait_all_tasks_blocked()
        assert gateway.port.stopped == [(r, 1, 0)]
        gateway.port.emit(EpochRaised(r, 2, 4, (2,)), Tokens(r, 2, 1, 2, tuple(other[2:3])))
        await anyio.wait_all_tasks_blocked()
        assert gateway.port.stopped == [(r, 1, 0)], "the new worker may know"
        gateway.port.emit(Tokens(r, 2, 0, 4, (5,)), Tokens(r, 2, 0, 5, (6,)))
        await anyio.wait_all_tasks_blocked()
        assert gateway.port.stopped == [(r, 1, 0), (r, 2, 0)]
        gateway.port.emit(Tokens(r, 2, 1, 3, tuple(other[3:])), Finished(r, 2, "stop", 6, 0, "", (len(other),)))
    assert not gateway.port.cancelled


async def test_a_worker_that_missed_a_hint_is_told_again(gateway: Gateway) -> None:
    """It goes on with a choice that is cut: after a second it is told once more, not for every token."""
    async with one_of_two_is_cut(gateway) as (r, _, other):
        for i in range(6):
            await anyio.wait_all_tasks_blocked()
            gateway.clock.advance(RETELL_S / 4)
            gateway.port.emit(Tokens(r, 1, 0, 3 + i, (5,)))
        await anyio.wait_all_tasks_blocked()
        assert gateway.port.stopped == [(r, 1, 0)] * 2
        gateway.port.emit(Tokens(r, 1, 1, 1, tuple(other[1:])), Finished(r, 1, "stop", 9, 0, "", (len(other),)))


async def test_logprobs_of_a_completion(gateway: Gateway) -> None:
    """Tokens, offsets and the best ones; a part of a character has its bytes for a name."""
    text = "Hello \N{PARROT} END"
    said = gateway.ids(text)
    gateway.port.script = say(said)
    async with gateway.client() as client:
        body = await ask(client, logprobs=2, max_tokens=len(said))
        parts = await stream(client, logprobs=2, max_tokens=len(said))
    logprobs = body["choices"][0]["logprobs"]
    raw = [gateway.tokenizer.token_bytes(t) for t in said]
    assert b"".join(raw).decode() == text
    assert logprobs["tokens"][0] == "Hello"
    assert any(name.startswith("bytes:\\x") for name in logprobs["tokens"])
    assert logprobs["token_logprobs"] == [pytest.approx(-0.5 - t / 1e6) for t in said]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3] * len(said)
    assert logprobs["text_offset"][:2] == [0, len(raw[0].decode())]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert text[logprobs["text_offset"][-1] :] == raw[-1].decode()
    streamed = [c["logprobs"] for part in parts for c in part["choices"] if c["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for one in streamed for x in one[name]] == logprobs[name]


async def test_logprobs_of_a_chat(gateway: Gateway) -> None:
    """`content` with bytes and top_logprobs; none without `logprobs: true`."""
    said = gateway.ids("Hello there")
    gateway.port.script = say(said)
    async with gateway.client() as client:
        body = await ask(client, CHAT, logprobs=True, top_logprobs=2, max_tokens=len(said))
        bare = await ask(client, CHAT, logprobs=True, max_tokens=len(said))
        without = await ask(client, CHAT, max_tokens=len(said))
        parts = await stream(client, CHAT, logprobs=True, top_logprobs=2, max_tokens=len(said))
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert "".join(entry["token"] for entry in logprobs["content"]) == "Hello there"
    assert bytes(b for entry in logprobs["content"] for b in entry["bytes"]) == b"Hello there"
    assert [len(entry["top_logprobs"]) for entry in logprobs["content"]] == [2] * len(said)
    assert all(entry["top_logprobs"] == [] for entry in bare["choices"][0]["logprobs"]["content"])
    assert without["choices"][0]["logprobs"] is None
    streamed = [e for p in parts for c in p["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == logprobs["content"]


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo(gateway: Gateway, max_tokens: int) -> None:
    """The prompt's text and logprobs come first; its first token has none. With max_tokens 0 nothing follows."""
    said, prompt = gateway.ids(" and more"), gateway.ids("hi you")
    gateway.port.script = say(said)
    async with gateway.client() as client:
        body = await ask(client, echo=True, logprobs=1, max_tokens=max_tokens)
        parts = await stream(client, echo=True, logprobs=1, max_tokens=max_tokens)
        plain = await ask(client, echo=True, max_tokens=max_tokens)
    choice = body["choices"][0]
    shown = said[:max_tokens]
    assert choice["text"] == "hi you" + gateway.tokenizer.decode(shown) == plain["choices"][0]["text"]
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *(pytest.approx(-0.5 - t / 1e6) for t in (*prompt[1:], *shown))]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert body["usage"]["completion_tokens"] == max_tokens
    assert "".join(c["text"] for p in parts for c in p["choices"]) == choice["text"]
    assert [x for p in parts for c in p["choices"] if c["logprobs"] for x in c["logprobs"]["tokens"]] == logprobs[
        "tokens"
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompt_logprobs_by_token_id(gateway: Gateway, path: str) -> None:
    """vLLM's field: null, then each token and the best ones, with their ranks."""
    gateway.port.script = say(gateway.ids("x"))
    async with gateway.client() as client:
        body = await ask(client, path, prompt_logprobs=1, max_tokens=1)
    found = body["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else body["prompt_logprobs"]
    prompt = gateway.port.admitted[0].token_ids
    assert found[0] is None
    assert len(found) == len(prompt)
    assert set(found[1]) == {str(prompt[1]), str(prompt[1] + 1)}
    assert found[1][str(prompt[1])]["rank"] == 2


async def test_a_streamed_chat_tells_of_its_prompt_once(gateway: Gateway) -> None:
    """What the whole answer has, in an event before any text, however many choices there are."""
    gateway.port.script = say(gateway.ids("x y"))
    async with gateway.client() as client:
        whole = await ask(client, CHAT, prompt_logprobs=1, max_tokens=2, n=2)
        parts = await stream(client, CHAT, prompt_logprobs=1, max_tokens=2, n=2)
        others = await stream(client, CHAT, max_tokens=2, n=2)
    texts = [i for i, part in enumerate(parts) if any(c["delta"].get("content") for c in part["choices"])]
    telling = [i for i, part in enumerate(parts) if "prompt_logprobs" in part]
    assert [parts[i]["prompt_logprobs"] for i in telling] == [whole["prompt_logprobs"]]
    assert telling[0] < texts[0]
    assert not any("prompt_logprobs" in part for part in others)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 4}, {"echo": True, "logprobs": 4}], ids=str)
async def test_what_is_told_of_prompts_is_bounded(gateway: Gateway, asked: dict[str, Any]) -> None:
    """n times all prompts' tokens times the entries of each: refused before the workers hear of it."""
    most = MAX_PROMPT_LOGPROBS // (20 * 5)
    gateway.port.script = say([5])
    async with gateway.client() as client:
        for lengths in ([most + 1], [most // 2, most // 2 + 1]):
            prompts = [[7] * length for length in lengths]
            response = await client.post(COMPLETIONS, json={"prompt": prompts, "n": 20, "max_tokens": 1} | asked)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == "prompt_logprobs"
            assert str(MAX_PROMPT_LOGPROBS) in error["message"]
        assert not gateway.port.admitted
        assert len((await ask(client, prompt=[7] * most, n=20, max_tokens=1, **asked))["choices"]) == 20


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (1e-300, 0.01), (0.009, 0.01), (0.02, 0.02), (None, 1.0)])
async def test_a_tiny_temperature_counts_as_the_least(gateway: Gateway, asked: float | None, used: float) -> None:
    """Above 0 it is drawn, as vLLM does; 0 stays greedy."""
    gateway.port.script = say([5])
    async with gateway.client() as client:
        await ask(client, temperature=asked, max_tokens=1)
    assert gateway.port.admitted[0].sampling.temperature == used


async def test_best_of_ranks_by_mean_logprob(gateway: Gateway) -> None:
    """A lower token is more probable here; the answer has the two best, and no logprobs unless asked for."""
    gateway.port.script = say([900, 900], [30, 40], [500, 2])
    async with gateway.client() as client:
        body = await ask(client, n=2, best_of=3, max_tokens=2)
        scored = await ask(client, n=1, best_of=3, max_tokens=2, logprobs=0)
    assert [c["text"] for c in body["choices"]] == [gateway.tokenizer.decode(t) for t in ([30, 40], [500, 2])]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 2
    assert body["usage"]["completion_tokens"] == 6


async def test_special_tokens_and_stops_are_shown_on_demand(gateway: Gateway) -> None:
    """skip_special_tokens, include_stop_str_in_output, for stop tokens and stop strings."""
    said = gateway.ids("one two three")
    end = gateway.tokenizer.end_token_ids[0]
    name = gateway.tokenizer.token_bytes(end).decode()
    gateway.port.script = say([*said, end])
    async with gateway.client() as client:

        async def text(**body: Any) -> str:
            return (await ask(client, max_tokens=20, **body))["choices"][0]["text"]

        assert await text() == "one two three"
        assert await text(skip_special_tokens=False) == "one two three"
        assert await text(skip_special_tokens=False, include_stop_str_in_output=True) == f"one two three{name}"
        assert await text(include_stop_str_in_output=True) == "one two three"
        assert await text(stop=" two") == "one"
        assert await text(stop=" two", include_stop_str_in_output=True) == "one two"
        assert await text(stop=" two", min_tokens=3) == "one two three"


async def test_a_gap_in_one_choice_is_repaired_from_its_log(gateway: Gateway) -> None:
    """The other choice's tokens are not touched; where logprobs are wanted, the request fails rather than lie."""
    one, two = gateway.ids("one two three"), gateway.ids("four five six")

    def script(request: GenerateRequest) -> list[GatewayMsg]:
        r = request.request_id
        return [
            Tokens(r, 1, 0, 0, tuple(one)),
            EpochRaised(r, 2, len(one), (len(two) - 1,)),
            Tokens(r, 2, 1, len(two) - 1, tuple(two[-1:])),
            Finished(r, 2, "length", len(one), 0, "", (len(two),)),
        ]

    gateway.port.script = script
    gateway.port.logs_of = {0: tuple(one), 1: tuple(two[:-1])}
    async with gateway.client() as client:
        body = await ask(client, n=2, max_tokens=5)
        assert [c["text"] for c in body["choices"]] == ["one two three", "four five six"]
        failed = await client.post(COMPLETIONS, json={"prompt": "x", "n": 2, "logprobs": 1, "max_tokens": 5})
    assert failed.status_code == 500
