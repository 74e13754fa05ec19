"""Whole stacks with a pool too small for what they run: preempted seqs are parked or computed again, unnoticed."""

import pytest

from tests.flow.stack import Stack
from tests.flow.test_matrix import Tally, ask_all
from tests.oracle.oracle import Oracle

pytestmark = [pytest.mark.anyio, pytest.mark.flow]
MAX_TOKENS = 90


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
