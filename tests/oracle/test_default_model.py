"""The default model, against `transformers` in fp32."""

import pytest
import torch

from services.engine.model import Model
from tests.oracle.driver import forward, greedy, make_runner, make_seqs
from tests.oracle.oracle import Greedy, Oracle, first_difference
from tests.oracle.prompts import ALL, LONG_TOKENS, long_text

ATOL = 1e-3
NUM_BLOCKS = 96


@pytest.fixture(scope="session")
def prompts(oracle: Oracle) -> dict[str, list[int]]:
    found = {name: oracle.encode(text) for name, text in ALL.items()}
    found["long"] = oracle.encode(long_text())[:LONG_TOKENS]
    assert len(found["long"]) == LONG_TOKENS
    assert len(found["short"]) == 1
    return found


@pytest.fixture(scope="session")
def teacher(oracle: Oracle, prompts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {name: oracle.logits(token_ids) for name, token_ids in prompts.items()}


@pytest.fixture(scope="session")
def answers(oracle: Oracle, prompts: dict[str, list[int]]) -> dict[str, Greedy]:
    return {name: oracle.greedy(token_ids, 24) for name, token_ids in prompts.items()}


@pytest.mark.parametrize("chunk", [32, 512])
@pytest.mark.parametrize("name", [*ALL, "long"])
def test_teacher_forced_logits(model: Model, prompts, teacher, name: str, chunk: int):
    """Every position's logits are the oracle's within 1e-3, however the prompt is cut."""
    runner = make_runner(model, NUM_BLOCKS)
    (seq,) = make_seqs([prompts[name]], room=0, num_blocks=NUM_BLOCKS)
    while seq.done < len(seq.token_ids):
        forward(model, runner, [(seq, min(chunk, len(seq.token_ids) - seq.done))])
    torch.testing.assert_close(torch.cat(seq.logits), teacher[name], rtol=0, atol=ATOL)


def test_teacher_forced_logits_in_mixed_batches(model: Model, prompts, teacher):
    """All prompts in the same steps, in chunks of unlike and changing sizes down to single decode rows."""
    names = [*ALL, "long"]
    runner = make_runner(model, NUM_BLOCKS)
    seqs = make_seqs([prompts[name] for name in names], room=0, num_blocks=NUM_BLOCKS)
    step = 0
    while unfinished := [s for s in seqs if s.done < len(s.token_ids)]:
        sizes = [(1, 17, 3, 64, 150)[(step + i) % 5] for i in range(len(unfinished))]
        forward(
            model,
            runner,
            [(s, min(n, len(s.token_ids) - s.done)) for s, n in zip(unfinished, sizes, strict=True)],
        )
        step += 1
    for name, seq in zip(names, seqs, strict=True):
        torch.testing.assert_close(torch.cat(seq.logits), teacher[name], rtol=0, atol=ATOL, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("chunk", [32, 512])
def test_greedy_tokens(model: Model, prompts, answers, chunk: int):
    """24 greedy tokens of six prompts that run together are the oracle's."""
    runner = make_runner(model, NUM_BLOCKS)
    seqs = make_seqs(list(prompts.values()), room=24, num_blocks=NUM_BLOCKS)
    for (name, want), got in zip(answers.items(), greedy(runner, seqs, 24, chunk), strict=True):
        assert first_difference(want, got) is None, f"{name}: {want.token_ids} but {got}"


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_sixteen_bit_kv_stays_near(model: Model, prompts, teacher, kv_dtype):
    """With KV in 16 bits the logits move by the rounding of keys and values, no more."""
    runner = make_runner(model, NUM_BLOCKS, kv_dtype=kv_dtype)
    (seq,) = make_seqs([prompts["code"]], room=0, num_blocks=NUM_BLOCKS)
    while seq.done < len(seq.token_ids):
        forward(model, runner, [(seq, min(32, len(seq.token_ids) - seq.done))])
    worst = (torch.cat(seq.logits) - teacher["code"]).abs().max()
    assert 1e-5 < worst < {"float16": 0.1, "bfloat16": 1.0}[kv_dtype]
