"""The quick paths keep the model's quality. `tests/oracle/perplexity.py` measures it on more tokens."""

import pytest

from tests.oracle.perplexity import compare


def test_the_default_path_costs_little_perplexity():
    """Within 2 % of float32 on 1,024 tokens (0.3 % on 20,000; the allowance is for the short text)."""
    exact, quick = compare(1024)
    assert 2 < exact < 60
    assert abs(quick / exact - 1) < 0.02


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "bound"), [("int8", 0.05), ("auto/bfloat16", 0.03), ("auto/int8", 0.03), ("auto/fp8", 0.06)]
)
def test_narrower_weights_and_caches_cost_what_is_said(case: str, bound: float):
    """Per-channel weights, and every type of the KV cache; DECISIONS.md has the figures for 20,480 tokens."""
    exact, quick = compare(2048, ("float32", case))
    assert abs(quick / exact - 1) < bound
