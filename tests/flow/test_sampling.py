"""Choices, log-probabilities and sampling parameters through whole stacks, with the openai client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.flow.stack import Stack
from tests.oracle.oracle import Oracle

pytestmark = [pytest.mark.anyio, pytest.mark.flow]

PROMPT = [5, 9, 200, 31, 7, 7, 64, 90, 11, 12, 13, 250, 3, 40, 41, 42, 43, 44, 45, 46, 9, 9]
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 77,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "max_tokens": 12,
}
EXTRA = {"ignore_eos": True, "min_p": 0.001, "repetition_penalty": 1.1, "top_k": 40}


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Iterator[Stack]:
    """Aggregated, with small chunks."""
    with Stack(
        prefill=0, decode=1, model__path=tiny_model, engine__num_blocks=400, engine__max_num_batched_tokens=16
    ) as s:
        yield s


def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def want_logprobs(oracle: Oracle, token_ids: list[int]) -> torch.Tensor:
    return oracle.logits(token_ids).double().log_softmax(-1)


def penalised_greedy(oracle: Oracle, prompt: list[int], count: int, **p: float) -> list[int]:
    """Full recompute with transformers, the parameters applied the obvious way."""
    out: list[int] = []
    for _ in range(count):
        x = oracle.logits(prompt + out)[-1].double()
        for token in set(prompt + out):
            x[token] = x[token] / p["repetition"] if x[token] > 0 else x[token] * p["repetition"]
        for token in set(out):
            x[token] -= p["frequency"] * out.count(token) + p["presence"]
        out.append(int(x.argmax()))
    return out


def test_echoed_prompts_have_the_oracles_logprobs(pair: Stack, alone: Stack, tiny_oracle: Oracle) -> None:
    """As lm-eval asks: echo, logprobs=1, max_tokens 0 or 1, several prompts; a warm cache hides none of them."""
    prompts = [PROMPT, PROMPT[:5], PROMPT + PROMPT[::-1]]
    want = [want_logprobs(tiny_oracle, p) for p in prompts]
    for stack in (pair, alone):
        for max_tokens in (1, 0, 1):
            answer = client(stack).completions.create(
                model="default", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3 * max_tokens
            for choice, prompt, logprobs in zip(answer.choices, prompts, want, strict=True):
                assert choice.logprobs is not None
                told, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
                assert told is not None
                assert tops is not None
                assert len(told) == len(prompt) + max_tokens == len(choice.logprobs.text_offset or [])
                assert told[0] is None
                for at in range(1, len(prompt)):
                    assert told[at] == pytest.approx(float(logprobs[at - 1, prompt[at]]), abs=1e-4)
                    assert max(tops[at].values()) == pytest.approx(float(logprobs[at - 1].max()), abs=1e-4)
                if max_tokens:
                    assert told[-1] == pytest.approx(float(logprobs[-1].max()), abs=1e-4)


def test_penalised_greedy_text_is_the_oracles(pair: Stack, alone: Stack, tiny_oracle: Oracle) -> None:
    """Penalties over prompt and output, across the handoff and in small chunks."""
    want = penalised_greedy(tiny_oracle, PROMPT, 12, repetition=1.3, frequency=0.7, presence=0.4)
    for stack in (pair, alone):
        answer = client(stack).completions.create(
            model="default",
            prompt=PROMPT,
            temperature=0,
            max_tokens=12,
            frequency_penalty=0.7,
            presence_penalty=0.4,
            extra_body={"repetition_penalty": 1.3, "ignore_eos": True},
        )
        assert list(stack.token_log(answer.id)) == want


def test_a_seed_says_the_same_in_any_mode_and_company(pair: Stack, alone: Stack) -> None:
    """Sampled with every parameter: aggregated and handed off, alone and among others; choice 0 of three is the single
    answer, and three choices are three choices again."""

    def ask(stack: Stack, n: int, seed: int = 77) -> list[str]:
        body = SAMPLED | {"seed": seed}
        answer = client(stack).completions.create(model="default", prompt=PROMPT, n=n, extra_body=EXTRA, **body)
        return [choice.text for choice in answer.choices]

    single = ask(pair, 1)
    assert ask(alone, 1) == single
    three = ask(pair, 3)
    assert three[:1] == single
    assert len(set(three)) == 3
    assert ask(alone, 3) == three
    assert ask(alone, 1, seed=78) != single
    pair.wait_idle()
    alone.wait_idle()


def test_greedy_choices_are_equal(pair: Stack, alone: Stack, tiny_oracle: Oracle) -> None:
    """n=4 at temperature 0: four times the oracle's text, the prompt counted once, no block left behind."""
    want = tiny_oracle.greedy(PROMPT, 10).token_ids
    for stack in (pair, alone):
        answer = client(stack).completions.create(
            model="default", prompt=PROMPT, n=4, temperature=0, max_tokens=10, extra_body={"ignore_eos": True}
        )
        assert stack.token_log(answer.id) == want
        assert len({choice.text for choice in answer.choices}) == 1
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 40)
        stack.wait_idle()


def test_a_stop_string_ends_its_choice_in_the_worker(pair: Stack, alone: Stack) -> None:
    """One of three choices is cut: the worker gives it up before the others, which say what they say without it."""
    # As many tokens as fit: the hint has to arrive before the end, also where the machine is busy.
    body = SAMPLED | {"model": "default", "prompt": PROMPT, "n": 3, "max_tokens": 1000, "extra_body": EXTRA}
    for stack in (pair, alone):
        whole = client(stack).completions.create(**body)
        texts = [choice.text for choice in whole.choices]
        at = next(i for i in range(20, 400) if not any(texts[1][i : i + 5] in other for other in (texts[0], texts[2])))
        stop, before = texts[1][at : at + 5], stack.total("decode", "choices_stopped_total")
        cut = client(stack).completions.create(stop=stop, **body)
        want = [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
        assert [choice.text for choice in cut.choices] == want
        assert [choice.finish_reason for choice in cut.choices] == ["length", "stop", "length"]
        assert stack.total("decode", "choices_stopped_total") == before + 1
        logs = [stack.token_log(cut.id, choice) for choice in range(3)]
        assert (len(logs[0]), len(logs[2])) == (1000, 1000)
        assert len(logs[1]) < 1000
        stack.wait_idle()


def test_best_of_gives_the_most_probable(pair: Stack) -> None:
    """The two best of five, by mean log-probability, of the same five that n=5 gives."""
    body = {**SAMPLED, "model": "default", "prompt": PROMPT, "extra_body": EXTRA}
    every = client(pair).completions.create(n=5, logprobs=0, **body).choices
    means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every}
    best = client(pair).completions.create(n=2, best_of=5, **body).choices
    assert [c.text for c in best] == sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert all(c.logprobs is None for c in best)


async def test_streamed_choices_with_logprobs(pair: Stack) -> None:
    """Asynchronous, three choices: the pieces joined are what is not streamed, tokens included."""
    body = {**SAMPLED, "model": "default", "prompt": PROMPT, "n": 3, "logprobs": 2, "extra_body": EXTRA}
    whole = client(pair).completions.create(**body)
    parts: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    aclient = openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0)
    async with aclient:
        async for event in await aclient.completions.create(stream=True, **body):
            for choice in event.choices:
                parts[choice.index].append(choice)
    for choice in whole.choices:
        got = parts[choice.index]
        assert "".join(p.text for p in got) == choice.text
        assert choice.logprobs is not None
        tokens = [t for p in got if p.logprobs for t in p.logprobs.token_logprobs]
        assert tokens == choice.logprobs.token_logprobs
        assert len(tokens) == 12
        assert got[-1].finish_reason == choice.finish_reason == "length"
