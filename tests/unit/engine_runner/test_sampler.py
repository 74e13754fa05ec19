"""The sampler against exact probabilities, in any company, at every edge."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import sampling
from kernels.cpu import _kernels
from kernels.reference import sampling as reference
from services.engine.sampler import sample as choose
from services.engine.sampler import uniform
from services.engine.types import SampleSpec
from shared.errors import ModelError
from shared.messages import SamplingParams


def spec(position: int = 0, *, choice: int = 0, **params) -> SampleSpec:
    return SampleSpec(SamplingParams(max_tokens=1, **params), choice, position)


def sample(logits, specs, num_threads=1, allowed=None) -> list[int]:
    return choose(logits, specs, num_threads, allowed).tokens


def exact_probabilities(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """The obvious way, in float64: softmax, cut, softmax again."""
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    kept = ranked[: top_k or len(ranked)]
    weights = np.exp((logits[kept].double().numpy() - float(logits.max())) / temperature)
    weights /= weights.sum()
    before = np.concatenate([[0], weights.cumsum()[:-1]])
    weights[before >= top_p] = 0
    out = np.zeros(len(logits))
    out[kept] = weights / weights.sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.7, 1.0, 0), (2.5, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 7), (0.9, 0.6, 5), (1.5, 0.999, 0)],
)
@pytest.mark.parametrize("body", ["compiled", "few candidates", "reference"])
def test_tokens_fall_as_often_as_their_probabilities_say(monkeypatch, temperature, top_p, top_k, body):
    """Chi-squared over 6,000 draws; in the reference also with few candidates (most rows ranked in full)."""
    if body != "compiled":
        monkeypatch.setattr(sampling, "extension", lambda: None)
        monkeypatch.setattr(reference, "CANDIDATES", 4 if body == "few candidates" else 256)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    draws, seed = 6_000, 11
    specs = [spec(i, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed) for i in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1).contiguous(), specs))
    expected = exact_probabilities(logits, temperature, top_p, top_k) * draws
    assert not set(counts) - set(np.flatnonzero(expected).tolist())
    likely = [i for i in np.flatnonzero(expected) if expected[i] >= 5]
    chi2 = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in likely)
    freedom = len(likely) - 1
    # A chi-squared variable is beyond mean + 5 standard deviations about once in a million.
    assert chi2 <= freedom + 5 * (2 * freedom) ** 0.5


def test_greedy_is_the_best_logit_and_the_lower_id_of_equals():
    """Temperature 0, and top_k = 1 at any temperature."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 1.0, 0.0, -1.0]])
    assert sample(logits, [spec(temperature=0.0), spec(temperature=0.0)]) == [1, 0]
    assert sample(logits, [spec(i, temperature=9.0, top_k=1) for i in (1, 2)]) == [1, 0]


def test_a_tiny_top_p_is_greedy():
    """The nucleus holds at least the best token; of equals, the lower id."""
    logits = torch.zeros(50, 600)
    logits[:, [17, 400]] = 1.0
    assert set(sample(logits, [spec(i, temperature=1.0, top_p=1e-9) for i in range(50)])) == {17}


def test_ties_across_the_border_of_the_candidates():
    """600 equal logits: top-k keeps the k lowest ids, though any 256 might be found as candidates."""
    logits = torch.zeros(400, 600)
    specs = [spec(i, temperature=1.0, top_k=300) for i in range(400)]
    tokens = sample(logits, specs)
    assert max(tokens) < 300
    assert len(set(tokens)) > 150
    half = sample(logits, [spec(i, temperature=1.0, top_p=0.5) for i in range(400)])
    assert 250 < max(half) < 300


def test_top_k_beyond_the_vocabulary_is_off():
    """As if it were 0."""
    logits = torch.randn(30, 20)
    wide = sample(logits, [spec(i, temperature=1.0, top_k=21) for i in range(30)])
    assert wide == sample(logits, [spec(i, temperature=1.0) for i in range(30)])


params = st.builds(
    lambda t, p, k, m, seed: {"temperature": t, "top_p": p, "top_k": k, "min_p": m, "seed": seed},
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    st.sampled_from([0, 1, 3, 40, 500]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.integers(-(2**63), 2**64 - 1),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(params, st.integers(0, 5), st.integers(0, 9000)), min_size=1, max_size=8), st.integers(0, 9))
def test_a_row_draws_the_same_alone_and_in_any_batch(rows, seed):
    """Neighbours, their params, and greedy rows between change nothing."""
    logits = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(seed)) * 3
    logits = (logits * 4).round() / 4  # with ties
    specs = [spec(position, choice=choice, **chosen) for chosen, choice, position in rows]
    together = sample(logits, specs)
    assert together == [sample(logits[i : i + 1], [specs[i]])[0] for i in range(len(rows))]
    assert together == sample(logits.flip(0).contiguous(), specs[::-1])[::-1]


@settings(max_examples=60, deadline=None)
@given(params, st.integers(0, 10_000), st.booleans())
def test_few_candidates_draw_the_same_as_many(chosen, position, wide):
    """How far the ranking was known is invisible in the result, and so is which body drew it."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(position)) * (8 if wide else 2)
    logits = logits.round() / 4  # with ties
    specs = [spec(position, **chosen)]
    answers = set(sample(logits, specs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "extension", lambda: None)
        for candidates in (1, 8, 64, 500):
            patch.setattr(reference, "CANDIDATES", candidates)
            answers.update(sample(logits, specs))
    assert len(answers) == 1


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
def test_the_compiled_body_draws_what_the_reference_draws(simd: bool):
    """Over a real vocabulary's size, flat and peaked rows, with and without cuts; a token with no weight never."""
    rng = np.random.default_rng(0)
    rows = 64
    logits = (rng.standard_normal((rows, 5003)) * rng.choice([0.1, 1, 5], (rows, 1))).astype(np.float32)
    logits[:, ::7] = -np.inf
    temperature = rng.choice([0.3, 1.0, 2.0], rows).astype(np.float32)
    top_k = rng.choice([1, 3, 50, 4000, 5003], rows)
    top_p, u = rng.choice([0.1, 0.9, 1.0], rows), rng.random(rows)
    got = np.empty(rows, np.int64)
    least = np.log(np.clip(rng.choice([0.0, 0.01, 0.3], rows), 1e-30, None)).astype(np.float32)
    _kernels.draw_tokens(logits, temperature, top_k, top_p, least, u, got, 2, simd)
    np.testing.assert_array_equal(got, reference.draw_tokens(logits, temperature, top_k, top_p, least, u))
    assert (got % 7 != 0).all()


def test_uniform_numbers_differ_by_seed_choice_and_position():
    """No two of 3,000 keys collide, and the numbers fill [0, 1) evenly."""
    keys = [spec(p, choice=c, seed=s) for p in range(100) for c in range(5) for s in (0, 1, 2, 3, 2**64 - 1, -7)]
    numbers = uniform(keys)
    assert len(set(numbers.tolist())) == len(keys)
    assert 0 <= numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert counts.min() > 230
    assert counts.max() < 370


def test_the_numbers_never_change():
    """A resumed request must go on with the same text after an upgrade."""
    assert uniform([spec(5, choice=1, seed=42)]).tolist() == [0.4286993804259347]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_raise(temperature: float):
    """NaN is a broken model, not a token."""
    logits = torch.full((1, 10), float("nan"))
    with pytest.raises(ModelError, match="not finite"), np.errstate(invalid="ignore"):
        sample(logits, [spec(temperature=temperature)])


@pytest.mark.parametrize("vocab", [40, 64, 71])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(vocab: int, temperature: float):
    """Greedy takes the best of the allowed, sampling never another; a row with all bits set is not constrained."""
    rng = np.random.default_rng(vocab)
    rows = 200
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32))
    may = rng.random((rows, vocab)) < 0.2
    may[np.arange(rows), rng.integers(0, vocab, rows)] = True
    may[0] = True
    bits = np.zeros((rows, -(-vocab // 32) * 32), np.uint8)
    bits[:, :vocab] = may
    allowed = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)
    specs = [spec(i, temperature=temperature) for i in range(rows)]
    free = sample(logits.clone(), specs)
    tokens = sample(logits.clone(), specs, 1, allowed)
    assert may[np.arange(rows), tokens].all()
    assert tokens[0] == free[0]
    if not temperature:
        assert tokens == np.where(may, logits.numpy(), -np.inf).argmax(-1).tolist()
