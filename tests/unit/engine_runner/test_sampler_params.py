"""Every parameter against the obvious way, in float64 with torch: distributions, greedy answers, log-probabilities."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kernels import sampling
from kernels.cpu import _kernels
from kernels.reference import sampling as reference
from services.engine.sampler import sample
from services.engine.types import SampleSpec
from shared.messages import SamplingParams

VOCAB = 48
PROMPT, OUTPUT = [3, 3, 9, 20, 31], [9, 9, 9, 7, 40]
STOPS = (5, 6)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.08},
    "min-p, then top-k, then top-p": {"min_p": 0.02, "top_k": 12, "top_p": 0.8, "temperature": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "frequency below 0": {"frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "bias": {"logit_bias": ((11, 2.0), (12, -1.5), (9, 1.0))},
    "ban": {"logit_bias": tuple((t, -100.0) for t in range(0, VOCAB, 2))},
    "min_tokens": {"min_tokens": len(OUTPUT) + 1, "stop_token_ids": STOPS},
    "min_tokens reached": {"min_tokens": len(OUTPUT), "stop_token_ids": STOPS},
    "all": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((5, 9.0), (11, 2.0)),
        "min_tokens": 9,
        "stop_token_ids": STOPS,
    },
}


def spec(at: int = 0, **params: Any) -> SampleSpec:
    """A row after PROMPT and OUTPUT. `at` makes the random number differ, by the seed."""
    seed = params.pop("seed", 0) + at
    chosen = SamplingParams(max_tokens=99, seed=seed, **params)
    return SampleSpec(chosen, 0, len(PROMPT) + len(OUTPUT), PROMPT + OUTPUT, len(PROMPT))


def some_logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def exact(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Probabilities after every parameter, in the documented order. Greedy is a temperature near 0."""
    x = logits.double().clone()
    for token, bias in p.logit_bias:
        x[token] += bias
    if len(OUTPUT) < p.min_tokens:
        x[list(p.stop_token_ids)] = -torch.inf
    for token in set(PROMPT + OUTPUT):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(OUTPUT):
        x[token] -= p.frequency_penalty * OUTPUT.count(token) + p.presence_penalty
    probs = torch.softmax(x / p.temperature, -1)
    probs[probs < p.min_p * probs.max()] = 0
    order = probs.argsort(descending=True, stable=True)
    if p.top_k:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    before = probs[order].cumsum(0) - probs[order]
    probs[order[before >= p.top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("body", ["compiled", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_fall_as_often_as_the_parameters_say(monkeypatch: pytest.MonkeyPatch, case: str, body: str) -> None:
    """Chi-squared over 8,000 draws; a token of probability 0 never falls."""
    if body == "reference":
        monkeypatch.setattr(sampling, "extension", lambda: None)
    draws, logits = 8_000, some_logits()
    specs = [spec(i, **CASES[case]) for i in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1).contiguous(), specs).tokens)
    expected = (exact(logits, specs[0].sampling) * draws).tolist()
    assert all(expected[token] > 1e-12 for token in counts)
    likely = [i for i in range(VOCAB) if expected[i] >= 5]
    rest = draws - sum(counts[i] for i in likely), draws - sum(expected[i] for i in likely)
    chi2 = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in likely)
    chi2 += (rest[0] - rest[1]) ** 2 / rest[1] if rest[1] >= 5 else 0.0
    freedom = max(1, len(likely))
    # Beyond mean + 5 standard deviations about once in a million.
    assert chi2 <= freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_greedy_takes_the_best_of_the_changed_logits(case: str) -> None:
    """Temperature 0 after biases and penalties."""
    params = CASES[case] | {"temperature": 0.0}
    cold = SamplingParams(max_tokens=1, **(params | {"temperature": 1e-3}))
    assert sample(some_logits()[None].clone(), [spec(**params)]).tokens == [int(exact(some_logits(), cold).argmax())]


def test_neighbours_change_nothing() -> None:
    """Each case alone and all of them in one step: the same token, the same log-probabilities."""
    rows = [spec(i, **(params | {"logprobs": i % 4 if i % 3 else None})) for i, params in enumerate(CASES.values())]
    logits = some_logits().expand(len(rows), -1)
    together = sample(logits.clone(), rows)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), [row])
        assert alone.tokens == together.tokens[i : i + 1]
        assert list(alone.logprobs or [None]) == [together.logprobs[i]]


POISON: list[dict[str, Any]] = [
    {name: value}
    for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
    for value in (1e-300, 1e-40, 1e300, -1e300, float("inf"), float("-inf"), float("nan"), 0.0)
] + [
    {"logit_bias": ((3, 1e300), (-7, 1.0), (9, float("nan")))},
    {"logit_bias": tuple((token, -1e300) for token in range(VOCAB))},
    {"stop_token_ids": (-1, VOCAB), "min_tokens": 99},
    {"top_k": -5},
    {"top_p": 1e-300},
    {"top_p": 0.0},
    {"top_p": float("nan")},
    {"logprobs": -3},
]


@pytest.mark.parametrize("body", ["compiled", "reference"])
@pytest.mark.parametrize("poison", POISON, ids=str)
def test_no_parameter_fails_the_rows_beside_it(
    monkeypatch: pytest.MonkeyPatch, poison: dict[str, Any], body: str
) -> None:
    """Whatever a request asks for, greedy or drawn, it gets a token, and its neighbour the same as without it."""
    if body == "reference":
        monkeypatch.setattr(sampling, "extension", lambda: None)
    innocent = spec(1, repetition_penalty=1.2, logprobs=2)
    logits = some_logits().expand(3, -1)
    alone = sample(logits[:1].clone(), [innocent])
    together = sample(logits.clone(), [spec(2, **poison), innocent, spec(3, **({"temperature": 0.0} | poison))])
    assert together.tokens[1] == alone.tokens[0]
    assert together.logprobs[1] == alone.logprobs[0]
    assert all(0 <= token < VOCAB for token in together.tokens)


def test_logprobs_are_the_models_own() -> None:
    """As log_softmax of the logits before any parameter; rank and best tokens as sorted."""
    logits = torch.randn(6, 5003, generator=torch.Generator().manual_seed(1)) * 3
    params = {"frequency_penalty": 2.0, "repetition_penalty": 3.0, "temperature": 0.3, "top_k": 50}
    choice = sample(logits.clone(), [spec(i, logprobs=i * 4, **params) for i in range(6)])
    want = logits.double().log_softmax(-1)
    for i, (token, told) in enumerate(zip(choice.tokens, choice.logprobs, strict=True)):
        assert told is not None
        assert told.logprob == pytest.approx(float(want[i, token]), abs=2e-6)
        assert told.rank == int((logits[i] > logits[i, token]).sum()) + 1
        order = logits[i].argsort(descending=True, stable=True)[: i * 4].tolist()
        assert [t for t, _ in told.top] == order
        np.testing.assert_allclose([p for _, p in told.top], want[i, order].numpy(), atol=2e-6)


def test_nothing_is_told_where_nobody_asked() -> None:
    """No arrays of None for a batch of plain requests."""
    assert sample(some_logits()[None], [spec()]).logprobs == ()


def test_what_a_grammar_demands_wins_over_min_tokens() -> None:
    """Only a stop token is allowed, and it is too early for it: it is taken all the same."""
    allowed = np.zeros((1, 2), np.uint32)
    allowed[0, 0] = 1 << 5
    for temperature in (0.0, 1.0):
        row = spec(min_tokens=99, stop_token_ids=STOPS, temperature=temperature)
        assert sample(some_logits()[None].clone(), [row], 1, allowed).tokens == [5]


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
def test_the_compiled_ops_do_what_the_reference_does(simd: bool) -> None:
    """Adjusting to the last bit; log-probabilities nearly so; masks exactly, at odd vocabulary sizes."""
    rng = np.random.default_rng(2)
    for vocab in (33, 64, 5003):
        logits = (rng.standard_normal((9, vocab)) * 4).astype(np.float32)
        want = logits.copy()
        counts = rng.integers(0, 60, 5)
        biases = rng.integers(0, 4, 5)
        how = sampling.Adjustments(
            rows=np.array([7, 0, 3, 8, 2]),
            bias_start=np.cumsum([0, *biases]),
            bias_ids=np.concatenate([rng.permutation(vocab)[:n] for n in biases]).astype(np.int32),
            bias=rng.standard_normal(biases.sum()).astype(np.float32),
            token_start=np.cumsum([0, *counts]),
            tokens=rng.integers(0, vocab, counts.sum()).astype(np.int32),
            num_prompt=(counts // 2).astype(np.int64),
            repetition=rng.choice([0.5, 1.0, 1.3], 5).astype(np.float32),
            frequency=rng.choice([-0.7, 0.0, 1.1], 5).astype(np.float32),
            presence=rng.choice([-0.2, 0.0, 0.9], 5).astype(np.float32),
        )
        sampling.adjust_logits(logits, how, 2)
        reference.adjust_logits(want, how)
        np.testing.assert_array_equal(logits, want)
        rows, tokens = np.array([1, 1, 8, 4]), rng.integers(0, vocab, 4)
        num_top = np.array([0, 5, 20, 1])
        got = (
            np.empty(4, np.float32),
            np.empty(4, np.int64),
            np.zeros((4, 20), np.int32),
            np.zeros((4, 20), np.float32),
        )
        _kernels.tell_logprobs(logits, rows, tokens, num_top, *got, 2, simd)
        told = reference.tell_logprobs(logits, rows, tokens, num_top)
        np.testing.assert_allclose(got[0], told[0], atol=2e-6)
        np.testing.assert_array_equal(got[1], told[1])
        for i, count in enumerate(num_top):
            np.testing.assert_array_equal(got[2][i, :count], told[2][i, :count])
            np.testing.assert_allclose(got[3][i, :count], told[3][i, :count], atol=2e-6)
        allowed = rng.integers(0, 2**32, (9, -(-vocab // 32)), dtype=np.uint32)
        allowed[0], allowed[1] = 0, 0xFFFFFFFF
        sampling.mask_logits(logits, allowed, 2)
        reference.mask_logits(want, allowed)
        np.testing.assert_array_equal(logits, want)


def test_impossible_ids_are_refused() -> None:
    """A token or row that does not exist raises, and nothing is written."""
    logits = np.zeros((1, 10), np.float32)
    one, none = np.array([0]), np.zeros(0, np.int32)
    for rows, tokens in (([0], [10]), ([0], [-1]), ([1], [3])):
        how = sampling.Adjustments(
            np.array(rows),
            np.array([0, 0]),
            none,
            none.astype(np.float32),
            np.array([0, 1]),
            np.array(tokens, np.int32),
            one,
            *(np.ones(1, np.float32) for _ in range(3)),
        )
        with pytest.raises(IndexError):
            sampling.adjust_logits(logits, how)
        with pytest.raises(IndexError):
            sampling.tell_logprobs(logits, np.array(rows), np.array(tokens), one)
    assert not logits.any()
