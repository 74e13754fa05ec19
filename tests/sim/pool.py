"""Runs worlds on all cores: each in a process of its own making, since a world is one thread of pure Python."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TypeVar

from tests.sim.catches import CATCHES
from tests.sim.mutant import Mutant
from tests.sim.mutants import BY_NAME
from tests.sim.plan import Plan, draw
from tests.sim.runner import Report, run

A = TypeVar("A")
R = TypeVar("R")

REQUESTS = 100
MAX_SEEDS = 400
"""Of a mutant that its remembered seed does not show any more."""


@contextmanager
def processes(count: int | None = None) -> Iterator[Callable[[Callable[[A], R], Iterable[A]], Iterator[R]]]:
    """A `map` over processes, in order, which begins with all jobs at once.

    :param count: None = as many as this machine has cores.
    """
    with executor(count) as pool:
        yield lambda job, items: pool.map(job, items)


def executor(count: int | None = None, *, is_idle: bool = False) -> ProcessPoolExecutor:
    """Processes that end with this one, however it ends.

    :param count: None = as many as this machine has cores.
    :param is_idle: they run only where nobody else wants the core.
    """
    cores = count or len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(cores, mp_context=get_context("spawn"), initializer=_begin, initargs=(is_idle,))


def _begin(is_idle: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if is_idle:
        with suppress(OSError):  # refused: then it runs beside the others
            os.setsid()
            rank(os.getpid(), 19, os.SCHED_IDLE)


def rank(pid: int, group_nice: int, policy: int) -> None:
    """How a process ranks among all others. A session is a scheduling group where the kernel groups by session, and
    within it a policy tells only its own processes apart.

    :raises OSError: the system does not allow it.
    """
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(group_nice))
    os.sched_setscheduler(pid, policy, os.sched_param(0))


def _end_with_parent() -> None:
    """Else a pool whose owner was killed runs on to the end of its jobs, and then waits for more."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass(frozen=True)
class Job:
    seed: int
    num_requests: int

    def plan(self) -> Plan:
        return draw(self.seed, self.num_requests)


def run_seed(job: Job) -> Report:
    """The seed's world; a report without its log, unless it failed."""
    report = run(job.plan())
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
