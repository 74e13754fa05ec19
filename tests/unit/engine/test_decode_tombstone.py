"""A decode worker that was told to drop a request before its task came."""

from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from services.decode.job import Job
from services.decode.worker import DecodeWorker
from shared.ids import AttemptId, Incarnation, RequestId
from shared.messages import DecodeTask, RequestState
from tests.unit.shared.cell import request

pytestmark = pytest.mark.anyio
ME, R = Incarnation("d"), RequestId("r")


class Leases:
    """Takes down what is said to it."""

    def __init__(self, is_known: bool) -> None:
        self.is_known = is_known
        self.said: list[tuple[Any, ...]] = []

    async def refund(self, holder: Incarnation, request_id: RequestId, epoch: int, keep: int | None) -> int:
        self.said.append(("refund", holder, request_id, epoch, keep))
        return 0

    async def requeue(self, request_id: RequestId, epoch: int, reason: str, max_attempts: int, lost: str) -> str:
        self.said.append(("requeue", request_id, epoch, lost))
        return "requeued" if self.is_known else "stale"


class Desk:
    """A decode worker of which only the taking in of tasks runs."""

    def __init__(self, leases: Leases) -> None:
        self.worker = DecodeWorker(ME, cast(Any, None), cast(Any, None), cast(Any, leases), 10.0, 100, 3)
        self.begun: list[int] = []
        self.worker._run_here = self._run_here  # type: ignore[method-assign]

    async def _run_here(self, job: Job) -> None:
        self.begun.append(job.fence.epoch)

    async def take(self, epoch: int) -> None:
        task = DecodeTask(
            request_id=R, epoch=epoch, attempt=AttemptId("a"), term=1, num_prompt_tokens=3, credit_blocks=1
        )
        async with anyio.create_task_group() as tasks:
            self.worker._tasks = tasks
            self.worker.take(task, RequestState(request=request(R), epoch=epoch))


async def test_a_task_that_was_cancelled_before_is_declined() -> None:
    """The credit goes back, and Redis knows why; a later epoch is work."""
    leases = Leases(is_known=False)
    desk = Desk(leases)
    desk.worker.cancel(R, 2, "")
    for epoch in (1, 2, 3):
        await desk.take(epoch)
    declined = [[("refund", ME, R, epoch, None), ("requeue", R, epoch, ME)] for epoch in (1, 2)]
    assert leases.said == [said for pair in declined for said in pair]
    assert desk.begun == [3]


async def test_what_redis_does_not_know_was_cancelled_is_declined_once() -> None:
    """The cancel was of a life of the request that Redis has lost, with higher epochs: that costs one attempt, not all
    until the epochs have caught up."""
    leases = Leases(is_known=True)
    desk = Desk(leases)
    desk.worker.cancel(R, 9, "")
    await desk.take(1)
    await desk.take(2)
    assert [said[0] for said in leases.said] == ["refund", "requeue"]
    assert desk.begun == [2]
