"""The processes that worlds run in."""

import os
import select
import subprocess
import sys
from pathlib import Path

from tests.sim.background import Background
from tests.sim.pool import Job
from tests.sim.runner import run

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import os, time
from tests.sim.pool import executor
pool = executor(2, is_idle=True)
assert pool.submit(os.sched_getscheduler, 0).result() == os.SCHED_IDLE
jobs = [pool.submit(time.sleep, 1000) for _ in range(4)]
print(*pool._processes, flush=True)
time.sleep(1000)
"""


def test_a_pool_ends_with_its_owner() -> None:
    """Which is killed while jobs run and wait: none of the processes goes on."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        workers = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(workers) == 2
    for worker in workers:
        assert select.select([worker], [], [], 30)[0], "it is still there"
        os.close(worker)


def test_what_runs_beside_is_what_runs_alone() -> None:
    """The same reports, of all seeds that were asked for."""
    background = Background([Job(3, 20), Job(4, 20)], ["emit keeps no log"])
    try:
        assert background.reports == {seed: run(Job(seed, 20).plan()).short() for seed in (3, 4)}
        assert background.catches["emit keeps no log"].violation
    finally:
        background.close()


def test_nobody_waits_for_what_is_not_asked_for_any_more() -> None:
    """Closed while a world runs, its process ends."""
    background = Background([Job(seed, 100_000) for seed in range(4)], ())
    workers = [os.pidfd_open(worker.pid) for worker in background._pool._processes.values() if worker.pid]
    background.close()
    assert workers
    for worker in workers:
        assert select.select([worker], [], [], 30)[0], "it is still there"
        os.close(worker)
