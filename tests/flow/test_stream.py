"""What a client sees of a stack of separate processes: streams, cancels, stop strings, many at once."""

import json
from collections.abc import Iterator

import anyio
import httpx
import pytest

from tests.flow.stack import Stack
from tests.oracle.oracle import Oracle

pytestmark = [pytest.mark.anyio, pytest.mark.flow, pytest.mark.timeout(180)]
PROMPT = "the ship and the storm of the long night " * 4


def body(prompt: object, **more: object) -> dict[str, object]:
    return {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True, **more}


@pytest.fixture
def client(pair: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pair.url, timeout=60) as client:
        yield client


def test_a_stream_is_the_oracles_text_token_for_token(pair: Stack, client: httpx.Client, tiny_oracle: Oracle) -> None:
    """SSE chunks add up; usage comes last; decode computed none of the prompt and moved exactly its blocks."""
    before, prompt_ids = pair.metrics("decode-0"), tiny_oracle.encode(PROMPT)
    events = []
    with client.stream(
        "POST", "/v1/completions", json=body(PROMPT, stream=True, stream_options={"include_usage": True})
    ) as r:
        assert r.status_code == 200
        for line in r.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
    want = tiny_oracle.greedy(prompt_ids, 16)
    assert pair.token_log(events[0]["id"]) == want.token_ids
    text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
    assert text == tiny_oracle.decode(list(want.token_ids))
    assert events[-1]["usage"]["prompt_tokens"] == len(prompt_ids)
    assert events[-1]["usage"]["completion_tokens"] == 16
    after = pair.metrics("decode-0")
    assert after["decode_engine_prompt_tokens_computed_total"] == before["decode_engine_prompt_tokens_computed_total"]
    blocks = after["decode_transfer_blocks_read_total"] - before["decode_transfer_blocks_read_total"]
    moved = after["decode_transfer_bytes_read_total"] - before["decode_transfer_bytes_read_total"]
    assert blocks == -(-len(prompt_ids) // 16)
    assert moved == blocks * after["decode_transfer_block_bytes"]
    pair.wait_idle()


def test_a_stop_string_across_token_borders_ends_the_text(
    pair: Stack, client: httpx.Client, tiny_oracle: Oracle
) -> None:
    """The text is cut before it, and the work upstream ends too."""
    full = tiny_oracle.decode(list(tiny_oracle.greedy(tiny_oracle.encode(PROMPT), 24).token_ids))
    stop = full[9:14]
    answer = client.post("/v1/completions", json=body(PROMPT, max_tokens=500, stop=stop)).json()
    assert answer["choices"][0]["text"] == full[: full.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    pair.wait_idle()


async def test_forty_requests_of_mixed_length_at_once(pair: Stack, tiny_oracle: Oracle) -> None:
    """Each gets its own tokens, whoever its neighbours in the batch are."""
    words = ["the", "ship", "and", "storm", "of", "long", "night", "in", "to", "on", "user"]
    prompts = [" ".join(words[(i * j) % 11] for j in range(1, 3 + 7 * i % 190)) for i in range(40)]
    answers: dict[int, httpx.Response] = {}
    async with httpx.AsyncClient(base_url=pair.url, timeout=120) as client:

        async def ask(i: int) -> None:
            answers[i] = await client.post("/v1/completions", json=body(prompts[i], max_tokens=4 + i % 29))

        async with anyio.create_task_group() as tasks:
            for i in range(40):
                tasks.start_soon(ask, i)
    for i, prompt in enumerate(prompts):
        assert answers[i].status_code == 200, answers[i].text
        want = tiny_oracle.greedy(tiny_oracle.encode(prompt), 4 + i % 29)
        assert pair.token_log(answers[i].json()["id"]) == want.token_ids, prompt
    pair.wait_idle()


async def test_a_gone_client_frees_everything(pair: Stack) -> None:
    """Thirty streams, each left after its first chunk or before it: no block, credit or lease stays behind."""
    async with httpx.AsyncClient(base_url=pair.url, timeout=60) as client:

        async def leave(i: int) -> None:
            request = body(f"{i} {PROMPT}" * (1 + i % 5), max_tokens=400, stream=True)
            with anyio.move_on_after(0.01 * i):
                async with client.stream("POST", "/v1/completions", json=request) as r:
                    async for _ in r.aiter_lines():
                        if i % 3 == 0:
                            return

        async with anyio.create_task_group() as tasks:
            for i in range(30):
                tasks.start_soon(leave, i)
    pair.wait_idle()


def test_a_cached_prefix_is_reported_and_not_moved_again(pair: Stack, client: httpx.Client) -> None:
    """The second time only the new blocks cross over, and usage says what was cached."""
    text = "a prefix that nobody else has, " * 8
    client.post("/v1/completions", json=body(text)).raise_for_status()
    pair.wait_idle()
    before = pair.metrics("decode-0")
    suffix = "and then a long new end of the prompt, quite beyond it"
    answer = client.post("/v1/completions", json=body(text + suffix)).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 100
    assert cached % 16 == 0
    after = pair.metrics("decode-0")
    num_blocks = -(-answer["usage"]["prompt_tokens"] // 16)
    assert after["decode_landed_total"] == before["decode_landed_total"] + 1
    moved = after["decode_transfer_blocks_read_total"] - before["decode_transfer_blocks_read_total"]
    assert moved == num_blocks - cached // 16
    pair.wait_idle()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_gives_the_same_text_again(client: httpx.Client, seed: int) -> None:
    """Sampled, not greedy; another seed gives another text."""
    texts = [
        client.post("/v1/completions", json=body(PROMPT, temperature=1.0, seed=s)).json()["choices"][0]["text"]
        for s in (seed, seed, seed + 10)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_request_that_ends_with_its_first_token_is_not_computed_twice(pair: Stack, client: httpx.Client) -> None:
    """Prefill finishes it; decode drops its reservation and computes nothing."""
    before = pair.metrics("decode-0")
    for i in range(5):
        answer = client.post("/v1/completions", json=body(f"{i} one token only. {PROMPT}", max_tokens=1)).json()
        assert answer["usage"]["completion_tokens"] == 1
        pair.wait_idle()
    after = pair.metrics("decode-0")
    for name in ("engine_prompt_tokens_computed_total", "fetch_failed_total", "transfer_failed_total"):
        moved = after[f"decode_{name}"] - before[f"decode_{name}"]
        assert moved == (5 if name == "transfer_failed_total" else 0), name


def test_a_stop_near_the_end_leaves_no_credit_behind(pair: Stack, client: httpx.Client, tiny_oracle: Oracle) -> None:
    """A stop string cancels upstream just as the worker completes the request: either way the credit comes back."""
    tokens = tiny_oracle.greedy(tiny_oracle.encode(PROMPT), 12).token_ids
    stop = tiny_oracle.decode(list(tokens))[-2:]
    for _ in range(40):
        client.post("/v1/completions", json=body(PROMPT, max_tokens=12, stop=stop)).raise_for_status()
    pair.wait_idle()
