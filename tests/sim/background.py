"""The long part of these tests, beside all others: worlds run on the cores that nobody else wants, from the moment at
which the tests are known; those that judge them come last and wait for what is not over yet. BATON_SIM_SEEDS and
BATON_SIM_REQUESTS size it."""

import os
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress

from tests.sim.pool import Catch, Job, catch, executor, rank, run_seed
from tests.sim.runner import Report

SEEDS = int(os.environ.get("BATON_SIM_SEEDS", "50"))
REQUESTS = int(os.environ.get("BATON_SIM_REQUESTS", "1000"))


class Background:
    """Seeds and planted bugs under way.

    :param mutants: names of bugs.
    """

    def __init__(self, seeds: Iterable[Job], mutants: Iterable[str]) -> None:
        self._pool = executor(is_idle=True)
        self._reports: dict[int, Future[Report]] = {job.seed: self._pool.submit(run_seed, job) for job in seeds}
        self._catches: dict[str, Future[Catch]] = {name: self._pool.submit(catch, name) for name in mutants}

    @property
    def reports(self) -> dict[int, Report]:
        """What each seed's world came to. Waits for all."""
        self._hurry()
        return {seed: future.result() for seed, future in self._reports.items()}

    @property
    def catches(self) -> dict[str, Catch]:
        """How each planted bug was caught. Waits for all."""
        self._hurry()
        return {name: future.result() for name, future in self._catches.items()}

    def close(self) -> None:
        """What is still under way ends now: nobody waits for it any more."""
        workers = list(self._pool._processes.values())
        is_over = all(future.done() for future in (*self._reports.values(), *self._catches.values()))
        self._pool.shutdown(wait=is_over, cancel_futures=True)
        if not is_over:
            for worker in workers:
                worker.kill()

    def _hurry(self) -> None:
        """Somebody waits: as important as others from now on, where the system allows that."""
        for worker in self._pool._processes.values():
            with suppress(OSError):
                if worker.pid is not None:
                    rank(worker.pid, 0, os.SCHED_OTHER)
