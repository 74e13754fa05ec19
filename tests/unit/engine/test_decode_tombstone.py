"""A decode worker that was told to drop a request before its task came."""

from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from services.decode.worker import DecodeWorker
from shared.ids import AttemptId, Incarnation, RequestId
from shared.messages import DecodeTask, RequestState
from tests.unit.shared.cell import request

pytestmark = pytest.mark.anyio
ME, R = Incarnation("d"), RequestId("r")


class Leases:
    """Takes down what is said to it."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    async def refund(self, holder: Incarnation, request_id: RequestId, epoch: int, keep: int | None) -> int:
        self.said.append(("refund", holder, request_id, epoch, keep))
        return 0

    async def requeue(self, request_id: RequestId, epoch: int, reason: str, max_attempts: int, lost: str) -> str:
        self.said.append(("requeue", request_id, epoch, lost))
        return "stale"


@pytest.mark.parametrize("epoch", [2, 3])
async def test_a_task_that_was_cancelled_before_is_given_up(epoch: int) -> None:
    """Not only dropped: should the cancel be of a life that Redis has forgotten, the request goes round once more. The
    credit goes back first, as for a task of this worker; a later epoch is work."""
    leases = Leases()
    worker = DecodeWorker(ME, cast(Any, None), cast(Any, None), cast(Any, leases), 10.0, 100, 3)
    task = DecodeTask(request_id=R, epoch=epoch, attempt=AttemptId("a"), term=1, num_prompt_tokens=3, credit_blocks=1)
    worker.cancel(R, 2, "")
    async with anyio.create_task_group() as tasks:
        worker._tasks = tasks
        begun: list[Any] = []
        worker._run_here = lambda job: begun.append(job) or anyio.lowlevel.checkpoint()  # type: ignore[method-assign,assignment]
        worker.take(task, RequestState(request=request(R), epoch=epoch))
    if epoch == 2:
        assert leases.said == [("refund", ME, R, 2, None), ("requeue", R, 2, ME)]
        assert not begun
    else:
        assert leases.said == []
        assert [job.fence.epoch for job in begun] == [3]
