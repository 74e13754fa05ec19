"""Planted bugs, each of which the judge must catch: one that survives fails the build."""

import pytest

from tests.sim.catches import CATCHES
from tests.sim.mutant import Mutant
from tests.sim.mutants import BY_NAME, MUTANTS
from tests.sim.pool import Catch, catch_it_alone, processes

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_planted_bug_is_caught(caught: dict[str, Catch], name: str) -> None:
    """Within a few seeds, by the judge that watches every seed."""
    assert caught[name].seed is not None, "it survives"


@pytest.mark.full
def test_it_is_the_bug_that_is_caught() -> None:
    """The same plans without their bugs are well."""
    with processes() as each:
        assert not [found.name for found in each(catch_it_alone, list(BY_NAME)) if found.without]


def test_a_bug_that_fits_no_script_any_more_is_loud() -> None:
    """Else a change of a script would turn its mutants off."""
    with pytest.raises(AssertionError, match="the script has changed"):
        Mutant("stale", script="emit", old="no such line").overrides()


def test_every_bug_changes_something() -> None:
    """Names are unique, and a planted script is another script."""
    assert len(BY_NAME) == len(MUTANTS)
    assert set(CATCHES) <= set(BY_NAME), "a remembered seed of a bug that is gone"
    for mutant in MUTANTS:
        assert mutant.patches or mutant.overrides(), mutant.name
