"""The second way in: a gateway reads the stream of submissions as one of a group, and answers each in its own task.

It reads no more than it has room for; the rest waits in the stream, where any gateway may take it. What it has, it
renews while it lives; what it leaves at its end, it gives up at once, so that the next gateway goes on with it.
"""

from collections.abc import Sequence
from typing import Protocol

import anyio
import structlog
from anyio.abc import TaskGroup

from services.gateway.queue_job import JobParts, QueueCounts, QueueJob, Results
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.errors import BusError
from shared.submissions import Submission

log = structlog.get_logger("gateway.queue")

RETRY_S = 1.0
RELEASE_S = 2.0


class Inbox(Results, Protocol):
    """What an ingress needs of `shared.submissions.Submissions`. Every method raises BusError."""

    async def read(self, max_entries: int) -> list[Submission]: ...

    async def claim(self, min_idle_s: float, max_entries: int) -> list[Submission]: ...

    async def renew(self, owned: Sequence[Submission]) -> list[bool]: ...

    async def release(self, owned: Sequence[Submission], lease_s: float) -> None: ...


class QueueIngress:
    """Start `run` in a task; cancel it to end."""

    def __init__(self, inbox: Inbox, shared: JobParts, clock: Clock, config: GatewayConfig) -> None:
        self._inbox, self._shared, self._clock = inbox, shared, clock
        self._lease_s, self._max_jobs = config.submission_lease_s, config.max_submissions
        self._jobs: dict[str, QueueJob] = {}
        self._left = anyio.Event()  # a job has ended

    async def run(self) -> None:
        """Serve submissions until cancelled, then give up what is open."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._claim, tasks)
                tasks.start_soon(self._renew)
                await self._read(tasks)
        finally:
            with anyio.move_on_after(RELEASE_S, shield=True):
                await self._release()

    def counts(self) -> QueueCounts:
        self._shared.counts.open = len(self._jobs)
        return self._shared.counts

    async def _read(self, tasks: TaskGroup) -> None:
        while True:
            room = self._max_jobs - len(self._jobs)
            if room <= 0:
                self._left = anyio.Event()
                await self._left.wait()
                continue
            try:
                self._start(await self._inbox.read(room), tasks)
            except BusError as exc:
                log.warning("queue.unreadable", error=str(exc))
                await self._clock.sleep(RETRY_S)

    async def _claim(self, tasks: TaskGroup) -> None:
        """Take over what a gateway that is gone has left."""
        while True:
            room = self._max_jobs - len(self._jobs)
            if room > 0:
                try:
                    found = await self._inbox.claim(self._lease_s, room)
                except BusError as exc:
                    log.warning("queue.unclaimable", error=str(exc))
                else:
                    if found:
                        log.info("queue.claimed", num_entries=len(found))
                    self._start(found, tasks)
            await self._clock.sleep(self._lease_s / 4)

    async def _renew(self) -> None:
        while True:
            await self._clock.sleep(self._lease_s / 4)
            owned = [job for job in self._jobs.values() if job.opened]
            try:
                answers = await self._inbox.renew([job.submission for job in owned])
            except BusError as exc:
                log.warning("queue.unrenewed", error=str(exc))
                continue
            for job, mine in zip(owned, answers, strict=True):
                if not mine:
                    job.scope.cancel()

    async def _release(self) -> None:
        try:
            await self._inbox.release([job.submission for job in self._jobs.values() if job.opened], self._lease_s)
        except BusError as exc:
            log.warning("queue.unreleased", error=str(exc))

    def _start(self, submissions: Sequence[Submission], tasks: TaskGroup) -> None:
        for submission in submissions:
            if submission.entry not in self._jobs:
                job = QueueJob(submission, self._shared)
                self._jobs[submission.entry] = job
                self._shared.counts.taken += 1
                tasks.start_soon(self._work, job)

    async def _work(self, job: QueueJob) -> None:
        await job.run()
        self._jobs.pop(job.submission.entry, None)  # not if cancelled from outside: then it is to be released
        self._left.set()
