"""The default path keeps the model's quality. `tests/oracle/perplexity.py` measures it on more tokens."""

from tests.oracle.perplexity import compare


def test_the_default_path_costs_little_perplexity():
    """Within 2 % of float32 on 1,024 tokens (0.3 % on 20,000; the allowance is for the short text)."""
    exact, quick = compare(1024)
    assert 2 < exact < 60
    assert abs(quick / exact - 1) < 0.02
