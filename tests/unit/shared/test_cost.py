"""The cost model: what it learns from noisy times of work whose true cost is known."""

import random

import pytest

from shared.cost import CostModel, Fit, StepShape


def true_prefill(tokens: int, context: float) -> float:
    return 0.004 + 0.001 * tokens + 2e-7 * tokens * context


def test_a_fit_finds_the_coefficients_of_noisy_times() -> None:
    """Within 5 % after a few hundred observations with 5 % of noise, and the error tells how far off it was."""
    rng, fit = random.Random(1), Fit(100.0, 1e5)
    for _ in range(400):
        tokens, context = rng.randint(8, 512), rng.uniform(0, 4000)
        fit.observe(true_prefill(tokens, context) * rng.gauss(1, 0.05), tokens, tokens * context)
    for tokens, context in ((64, 0.0), (512, 256.0), (512, 3000.0)):
        assert fit.predict(tokens, tokens * context) == pytest.approx(true_prefill(tokens, context), rel=0.05)
    assert 0.01 < fit.error < 0.1


def test_coefficients_are_never_negative() -> None:
    """Times that fall with size, which only noise can make, do not lead to predictions below zero."""
    fit = Fit(10.0)
    for size in range(1, 50):
        fit.observe(1.0 / size, size)
    assert min(fit.coefficients) >= 0
    assert (fit.predict(1000.0) or 0) > 0


def test_a_machine_that_slows_down_is_noticed() -> None:
    """Old observations fade: after a few hundred new ones the prediction is the new speed's."""
    rng, fit = random.Random(2), Fit(1e6)
    for slowness in (1.0, 4.0):
        for _ in range(600):
            size = rng.uniform(1e5, 1e7)
            fit.observe(slowness * (1e-4 + size * 2e-10), size)
    assert fit.predict(5e6) == pytest.approx(4 * (1e-4 + 1e-3), rel=0.1)


def test_nothing_is_known_before_the_first_observation() -> None:
    """None, not zero; times too short to be measured teach nothing."""
    model = CostModel()
    assert model.step_s(StepShape(num_seqs=3, kv_tokens=100)) is None
    model.observe_step(StepShape(num_seqs=3, kv_tokens=100), 0.0)
    assert model.step_s(StepShape(num_seqs=3, kv_tokens=100)) is None
    assert model.recompute_s(100) is None


def test_a_mixed_step_costs_both_parts_and_one_start() -> None:
    """Chunks and decode rows in one step share what a step costs in itself, and its error is kept apart."""
    rng, model = random.Random(3), CostModel()
    for _ in range(300):
        tokens, seqs, kv = rng.randint(8, 512), rng.randint(1, 32), rng.randint(10, 30000)
        model.observe_step(StepShape(num_tokens=tokens, token_context=tokens * tokens / 2), 0.004 + 0.001 * tokens)
        model.observe_step(StepShape(num_seqs=seqs, kv_tokens=kv), 0.004 + 0.002 * seqs + 1e-7 * kv)
    mixed = StepShape(num_tokens=100, token_context=5000.0, num_seqs=10, kv_tokens=2000)
    assert model.step_s(mixed) == pytest.approx(0.004 + 0.1 + 0.02 + 2e-4, rel=0.05)
    before = model.prefill.num_observed
    model.observe_step(mixed, 0.25)
    assert model.prefill.num_observed == before
    assert model.stats()["error_mixed"] > 0
