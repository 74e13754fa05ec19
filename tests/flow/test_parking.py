"""Whole stacks with a pool too small for what they run: preempted seqs are parked or computed again, unnoticed."""

from collections.abc import Sequence
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


@pytest.mark.parametrize(("num_prefill", "park_bytes"), [(1, 64 << 20), pytest.param(0, 0, marks=pytest.mark.full)])
async def test_preempted_choices_say_the_same(pair: Stack, tiny_model: Path, num_prefill: int, park_bytes: int) -> None:
    """Three prompts of four sampled choices each, in a pool for little more than one prompt's: texts and logprobs as
    with room for all, and no block left behind."""
    prompts = [[(11 * i + 5 * j) % 200 + 5 for j in range(40 + 3 * i)] for i in range(3)]
    roomy = await say(pair, prompts)
    assert pair.total("decode", "engine_preemptions_total") == 0
    settings = {"engine__num_blocks": 32, "engine__park_bytes": park_bytes, "scheduler__growth_tokens": 8}
    with Stack(prefill=num_prefill, decode=1, model__path=tiny_model, **settings) as stack:
        tight = await say(stack, prompts)
        stack.wait_idle()
        preempted = stack.total("decode", "engine_preemptions_total")
        assert preempted > 0
        assert stack.total("decode", "engine_preemptions_parked_total") == (preempted if park_bytes else 0)
    assert len({text for choices in roomy for text, _ in choices}) == 12
    assert tight == roomy


@pytest.mark.parametrize(
    ("num_prefill", "park_bytes"),
    [
        (0, 0),
        (1, 64 << 20),
        pytest.param(0, 64 << 20, marks=pytest.mark.full),
        pytest.param(1, 0, marks=pytest.mark.full),
    ],
)
async def test_preempted_answers_are_the_oracles(
    tiny_model, tiny_oracle: Oracle, num_prefill: int, park_bytes: int
) -> None:
    """Eight answers that together need twice the decode worker's blocks; then everything is free again."""
    asked = {f"p{i}": [(7 * i + 3 * j) % 200 + 5 for j in range(36 + i)] for i in range(8)}
    settings = {"engine__num_blocks": 32, "engine__park_bytes": park_bytes, "scheduler__growth_tokens": 8}
    tally = Tally()
    with Stack(prefill=num_prefill, decode=1, model__path=tiny_model, **settings) as stack:
        answers = await ask_all(stack, asked, MAX_TOKENS)
        for name, ids in asked.items():
            tally.add(tiny_oracle.greedy(ids, MAX_TOKENS), answers[name]["tokens"], name)
        stack.wait_idle()
        preempted = stack.total("decode", "engine_preemptions_total")
        parked = stack.total("decode", "engine_preemptions_parked_total")
        assert preempted > 0
        assert parked == (preempted if park_bytes else 0)
        assert stack.total("decode", "engine_preemptions_recomputed_total") == preempted - parked
        assert stack.total("decode", "engine_bytes_parked") == 0
    assert tally.excused <= 1
