"""Processes die and pools run dry; the client's text goes on as if nothing had been."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import httpx
import pytest

from tests.flow.stack import Stack
from tests.oracle.oracle import Oracle, first_difference

pytestmark = [pytest.mark.anyio, pytest.mark.flow, pytest.mark.timeout(240)]
FAST = {"lease__heartbeat_s": 0.3, "lease__lease_s": 2.0}
PROMPT = "the ship and the storm of the long night " * 4


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"model": "default", "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}


def stream(
    stack: Stack, request: dict[str, object], on_event: Callable[[int], None] = lambda n: None
) -> tuple[str, str]:
    """(response id, text); `on_event(n)` after the n-th chunk with text. An error event fails the test."""
    text, n, response_id = "", 0, ""
    with httpx.stream("POST", f"{stack.url}/v1/completions", json={**request, "stream": True}, timeout=120) as r:
        assert r.status_code == 200
        for line in r.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            response_id = event["id"]
            if event["choices"] and event["choices"][0]["text"]:
                text, n = text + event["choices"][0]["text"], n + 1
                on_event(n)
    return response_id, text


@pytest.fixture(scope="module")
def three(tiny_model: Path) -> Iterator[Stack]:
    """Two decode workers, so that one can die."""
    with Stack(prefill=1, decode=2, model__path=tiny_model, engine__num_blocks=400, **FAST) as stack:
        yield stack


def busy_decode(stack: Stack) -> str:
    return next(name for name in ("decode-0", "decode-1") if stack.metrics(name)["decode_active"])


def test_a_decode_worker_is_killed_mid_stream(three: Stack, tiny_oracle: Oracle) -> None:
    """Another one goes on from the tokens already sent; the client sees neither gap nor repeat."""
    victim: list[str] = []

    def kill(n: int) -> None:
        if n == 5:
            victim.append(busy_decode(three))
            three.kill(victim[0])

    response_id, text = stream(three, body(PROMPT, max_tokens=600), kill)
    want = tiny_oracle.greedy(tiny_oracle.encode(PROMPT), 600)
    assert first_difference(want, three.token_log(response_id)) is None
    assert text == tiny_oracle.decode(list(three.token_log(response_id)))
    assert three.metrics("scheduler")["scheduler_num_requeued_total"] >= 1
    three.start(victim[0])
    three.wait_ready(victim[0])
    three.wait_idle()


def test_a_choice_that_was_cut_is_cut_again_after_a_death(three: Stack) -> None:
    """Of three choices one ends with a stop string, then their worker dies: all texts are what they would have been,
    and the next worker, which goes on with all three, is told of the one."""
    asked = body(PROMPT, max_tokens=700, n=3, temperature=0.9, seed=5)
    with httpx.Client(base_url=three.url, timeout=120) as client:
        texts = [c["text"] for c in client.post("/v1/completions", json=asked).json()["choices"]]
    at = next(i for i in range(20, 300) if not any(texts[1][i : i + 5] in other for other in (texts[0], texts[2])))
    stop, got, victim = texts[1][at : at + 5], ["", "", ""], ""
    ended: set[int] = set()
    with httpx.stream("POST", f"{three.url}/v1/completions", json=asked | {"stop": stop, "stream": True}) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            got[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
            if ended == {1} and not victim and choice["index"] == 0:
                victim = busy_decode(three)
                survivor = "decode-1" if victim == "decode-0" else "decode-0"
                before = three.metrics(survivor)["decode_choices_stopped_total"]
                three.kill(victim)
    assert got == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    assert victim, "they were too fast"
    assert three.metrics(survivor)["decode_choices_stopped_total"] == before + 1
    three.start(victim)
    three.wait_ready(victim)
    three.wait_idle()


def test_a_decode_worker_is_frozen_longer_than_its_lease(three: Stack, tiny_oracle: Oracle) -> None:
    """It wakes up fenced: nothing of what it still says reaches the client, and it starts a new life."""
    victim: list[str] = []

    def freeze(n: int) -> None:
        if n == 5:
            victim.append(busy_decode(three))
            three.signal(victim[0], 19)

    response_id, _ = stream(three, body(PROMPT + "again ", max_tokens=600), freeze)
    three.signal(victim[0], 18)
    want = tiny_oracle.greedy(tiny_oracle.encode(PROMPT + "again "), 600)
    assert first_difference(want, three.token_log(response_id)) is None
    assert three._processes[victim[0]].wait(20) != 0, "a buried worker must not go on"
    three.start(victim[0])
    three.wait_ready(victim[0])
    three.wait_idle()


def test_a_drained_worker_finishes_what_it_has(three: Stack, tiny_oracle: Oracle) -> None:
    """SIGTERM in mid-stream: nothing is lost, nothing moves, exit code 0."""
    codes: list[int] = []
    waiter: list[threading.Thread] = []

    def drain(n: int) -> None:
        if n == 5:
            name = busy_decode(three)
            waiter.append(threading.Thread(target=lambda: codes.append(three.stop(name))))
            waiter[0].start()
            waiter.append(threading.Thread(target=three.start, args=(name,)))

    response_id, _ = stream(three, body(PROMPT + "once more ", max_tokens=300), drain)
    waiter[0].join()
    assert codes == [0]
    want = tiny_oracle.greedy(tiny_oracle.encode(PROMPT + "once more "), 300)
    assert first_difference(want, three.token_log(response_id)) is None
    waiter[1].run()
    three.wait_ready()
    three.wait_idle()


@pytest.mark.parametrize("prefill", [0, pytest.param(1, marks=pytest.mark.full)])  # test_parking.py has both
async def test_a_tiny_pool_preempts_and_everything_finishes(
    tiny_model: Path, tiny_oracle: Oracle, prefill: int
) -> None:
    """Ten requests that need 11 blocks each share 36 blocks: preempted ones go on with the same tokens."""
    settings = {"engine__num_blocks": 36, "scheduler__growth_tokens": 16, "model__max_model_len": 256}
    prompts = [f"{i} {PROMPT}"[: 60 + 9 * i] for i in range(10)]
    answers: dict[int, httpx.Response] = {}
    with Stack(prefill=prefill, decode=1, model__path=tiny_model, **settings) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:

            async def ask(i: int) -> None:
                answers[i] = await client.post("/v1/completions", json=body(prompts[i], max_tokens=120))

            async with anyio.create_task_group() as tasks:
                for i in range(10):
                    tasks.start_soon(ask, i)
        for i, prompt in enumerate(prompts):
            assert answers[i].status_code == 200, answers[i].text
            want = tiny_oracle.greedy(tiny_oracle.encode(prompt), 120)
            assert first_difference(want, stack.token_log(answers[i].json()["id"])) is None
        assert stack.metrics("decode-0")["decode_engine_preemptions_total"] > 0
        stack.wait_idle()


def test_a_prefill_worker_is_killed_mid_prefill(oracle_default: Oracle) -> None:
    """The real model, so that a prompt takes a while: the answer comes all the same, token for token."""
    prompt_ids = oracle_default.encode("The keeper wrote in the log of every ship that passed. " * 60)
    assert len(prompt_ids) > 600
    with Stack(prefill=1, decode=1, engine__max_num_batched_tokens=64, **FAST) as stack:
        done: list[tuple[str, str]] = []
        request = body("", max_tokens=12) | {"prompt": prompt_ids}
        thread = threading.Thread(target=lambda: done.append(stream(stack, request)))
        thread.start()
        stack.wait_until(
            lambda: stack.metrics("prefill-0")["prefill_engine_prompt_tokens_computed_total"] >= 64, "first chunk", 30
        )
        stack.kill("prefill-0")
        thread.join(100)
        assert done, "no answer\n" + stack.tail()
        want = oracle_default.greedy(prompt_ids, 12)
        assert first_difference(want, stack.token_log(done[0][0])) is None
        computed = stack.metrics("decode-0")["decode_engine_prompt_tokens_computed_total"]
        assert computed >= len(prompt_ids) - 1, "it was recomputed, and that is counted"
        stack.start("prefill-0")
        stack.wait_ready("prefill-0")
        stack.wait_until(lambda: stack.metrics("scheduler")["scheduler_num_workers"] == 2, "it is back", 10)
        response_id, _ = stream(stack, request | {"prompt": prompt_ids[100:200]})
        assert first_difference(oracle_default.greedy(prompt_ids[100:200], 12), stack.token_log(response_id)) is None
        assert stack.metrics("prefill-0")["prefill_handed_off_total"] == 1, "the new life gets work"
        stack.wait_idle()
