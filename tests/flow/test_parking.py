"""Whole stacks with a pool too small for what they run: preempted seqs are parked or computed again, unnoticed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.flow.stack import Stack
from tests.flow.test_matrix import Tally, ask_all
from tests.oracle.oracle import Oracle

pytestmark = [pytest.mark.anyio, pytest.mark.flow]
MAX_TOKENS = 90
PARKED, RECOMPUTED = 64 << 20, 0  # bytes to park in
COUNTERS = ("engine_preemptions_total", "engine_preemptions_parked_total", "engine_preemptions_recomputed_total")


@pytest.fixture(scope="module")
def tight(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Stack]:
    """A decode worker with 32 blocks, of (number of prefill workers, bytes to park in)."""
    num_prefill, park_bytes = request.param
    settings = {"engine__num_blocks": 32, "engine__park_bytes": park_bytes, "scheduler__growth_tokens": 8}
    with Stack(prefill=num_prefill, decode=1, model__path=tiny_model, **settings) as stack:
        yield stack


def preemptions(stack: Stack) -> tuple[float, ...]:
    """So far: in all, those parked, those computed again."""
    return tuple(stack.total("decode", name) for name in COUNTERS)


def since(stack: Stack, before: Sequence[float]) -> tuple[float, ...]:
    return tuple(now - then for now, then in zip(preemptions(stack), before, strict=True))


SAMPLED: dict[str, Any] = {
    **{"model": "default", "temperature": 0.9, "top_p": 0.9, "max_tokens": MAX_TOKENS, "n": 4, "ignore_eos": True},
    **{"presence_penalty": 0.4, "logprobs": 1},
}


async def say(stack: Stack, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """The choices of all prompts, asked for at once: texts and the tokens' log-probabilities."""
    out: list[Any] = [None] * len(prompts)
    async with httpx.AsyncClient(base_url=stack.url, timeout=600) as client, anyio.create_task_group() as tasks:

        async def ask(i: int) -> None:
            answer = await client.post("/v1/completions", json=SAMPLED | {"prompt": prompts[i], "seed": i})
            assert answer.status_code == 200, answer.text
            out[i] = [(c["text"], c["logprobs"]["token_logprobs"]) for c in answer.json()["choices"]]

        for i in range(len(prompts)):
            tasks.start_soon(ask, i)
    return out


@pytest.mark.parametrize(
    "tight", [(1, PARKED), pytest.param((0, RECOMPUTED), marks=pytest.mark.full)], indirect=True, ids=str
)
async def test_preempted_choices_say_the_same(pair: Stack, tight: Stack) -> None:
    """Three prompts of four sampled choices each, in a pool for little more than one prompt's: texts and logprobs as
    with room for all, and no block left behind."""
    prompts = [[(11 * i + 5 * j) % 200 + 5 for j in range(40 + 3 * i)] for i in range(3)]
    before, before_tight = preemptions(pair), preemptions(tight)
    roomy = await say(pair, prompts)
    assert since(pair, before) == (0, 0, 0)
    said = await say(tight, prompts)
    tight.wait_idle()
    preempted, parked, _ = since(tight, before_tight)
    assert preempted > 0
    assert parked == (preempted if tight.settings.engine.park_bytes else 0)
    assert len({text for choices in roomy for text, _ in choices}) == 12
    assert said == roomy


@pytest.mark.parametrize(
    "tight",
    [
        (0, RECOMPUTED),
        (1, PARKED),
        pytest.param((0, PARKED), marks=pytest.mark.full),
        pytest.param((1, RECOMPUTED), marks=pytest.mark.full),
    ],
    indirect=True,
    ids=str,
)
async def test_preempted_answers_are_the_oracles(tight: Stack, tiny_oracle: Oracle) -> None:
    """Eight answers that together need twice the decode worker's blocks; then everything is free again."""
    asked = {f"p{i}": [(7 * i + 3 * j) % 200 + 5 for j in range(36 + i)] for i in range(8)}
    tally, before = Tally(), preemptions(tight)
    answers = await ask_all(tight, asked, MAX_TOKENS)
    for name, ids in asked.items():
        tally.add(tiny_oracle.greedy(ids, MAX_TOKENS), answers[name]["tokens"], name)
    tight.wait_idle()
    preempted, parked, recomputed = since(tight, before)
    assert preempted > 0
    assert parked == (preempted if tight.settings.engine.park_bytes else 0)
    assert recomputed == preempted - parked
    assert tight.total("decode", "engine_bytes_parked") == 0
    assert tally.excused <= 1
