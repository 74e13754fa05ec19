"""Runs worlds on all cores: each in a process of its own making, since a world is one thread of pure Python."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TypeVar

from tests.sim.catches import CATCHES
from tests.sim.mutant import Mutant
from tests.sim.mutants import BY_NAME
from tests.sim.plan import draw
from tests.sim.runner import Report, run

A = TypeVar("A")
R = TypeVar("R")

REQUESTS = 100
MAX_SEEDS = 100
"""Of a mutant that its remembered seed does not show any more."""


@contextmanager
def processes(count: int | None = None) -> Iterator[Callable[[Callable[[A], R], Iterable[A]], Iterator[R]]]:
    """A `map` over processes, in order, which begins with all jobs at once.

    :param count: None = as many as this machine has cores.
    """
    cores = count or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as executor:
        yield lambda job, items: executor.map(job, items)


@dataclass(frozen=True)
class Job:
    seed: int
    num_requests: int


def run_seed(job: Job) -> Report:
    """The seed's world; a report without its log, unless it failed."""
    report = run(draw(job.seed, job.num_requests))
    return report if report.violations else report.short()


def run_cancels(job: Job) -> Report:
    """Every client leaves, at whatever moment; nothing else goes wrong. In a crowd most would leave unserved."""
    return run(draw(job.seed, job.num_requests, kinds=(), pace=10, leavers=1.0, queued=0.0, crowd=1.0)).short()


@dataclass(frozen=True)
class Catch:
    """How a planted bug was caught."""

    name: str
    seed: int | None  # None: it survived
    violation: str = ""
    without: tuple[str, ...] = ()  # violations of the same plan without the bug: there must be none


def catch(name: str) -> Catch:
    """Look for the planted bug: in the seed that showed it last, then in others. Its world ends when it shows."""
    mutant = BY_NAME[name]
    for seed in dict.fromkeys((CATCHES.get(name, 1), *range(1, MAX_SEEDS + 1))):
        if violation := try_seed(mutant, seed):
            return Catch(name, seed, violation)
    return Catch(name, None)


def catch_it_alone(name: str) -> Catch:
    """As `catch`, and whether the same plan is well without the bug."""
    found = catch(name)
    if found.seed is None:
        return found
    return replace(found, without=run(BY_NAME[name].plan(found.seed, REQUESTS)).violations)


def try_seed(mutant: Mutant, seed: int) -> str:
    """What the mutant violates first under this seed; "" if nothing."""
    with mutant.planted():
        report = run(mutant.plan(seed, REQUESTS), mutant.overrides())
    return report.violations[0] if report.violations else ""
