"""Every planted bug is caught. One that survives fails the build."""

import pytest

from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.runner import run

SEEDS = 16
REQUESTS = 100

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]  # minutes, so only with `./baton test --full`


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    """Within a few seeds."""
    for seed in range(1, SEEDS + 1):
        with mutant.planted():
            if run(mutant.plan(seed, REQUESTS), mutant.overrides()).violations:
                return
    pytest.fail("it survives")


@pytest.mark.parametrize("kinds", sorted({mutant.kinds or () for mutant in MUTANTS}), ids=str)
def test_it_is_the_bug_that_is_caught(kinds: tuple[str, ...]) -> None:
    """The same plans without the bug are well: so the faults alone prove nothing."""
    mutant = next(m for m in MUTANTS if (m.kinds or ()) == kinds)
    for seed in (1, 2, 3):
        assert not run(mutant.plan(seed, REQUESTS)).violations
