"""Starts the simulation's long part once the tests are chosen, and puts last those that wait for it."""

import pytest

from tests.sim.background import REQUESTS, SEEDS, Background
from tests.sim.mutants import BY_NAME
from tests.sim.pool import Catch, Job
from tests.sim.runner import Report

WAITING = ("reports", "caught")  # fixtures
_RUNNING = pytest.StashKey[Background]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: any(name in WAITING for name in _fixtures(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = {name for item in session.items for name in _fixtures(item)}
    if wanted.intersection(WAITING) and not session.config.option.collectonly:
        seeds = range(1, SEEDS + 1) if "reports" in wanted else ()
        mutants = BY_NAME if "caught" in wanted else ()
        session.stash[_RUNNING] = Background([Job(seed, REQUESTS) for seed in seeds], mutants)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _RUNNING in session.stash:
        session.stash[_RUNNING].close()


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> dict[int, Report]:
    """Of all seeds."""
    return request.session.stash[_RUNNING].reports


@pytest.fixture(scope="session")
def caught(request: pytest.FixtureRequest) -> dict[str, Catch]:
    """Of all planted bugs."""
    return request.session.stash[_RUNNING].catches
