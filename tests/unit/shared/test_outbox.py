"""The outbox: in order, beside the engine, and as much at once as waits."""

import anyio
import pytest

from shared.ids import AttemptId, Incarnation, RequestId
from shared.leases import Fence
from shared.messages import Finished, Tokens
from shared.outbox import MAX_TOGETHER, Ending, Outbox, Parcel

pytestmark = pytest.mark.anyio
G, D, A = Incarnation("g"), Incarnation("d"), AttemptId("a")


class SlowLeases:
    """Takes what is said, one call at a time, when the test lets it."""

    def __init__(self) -> None:
        self.said: list[list[tuple[str, int]]] = []  # per call: (request, index), and index -1 for an end
        self.stale: set[str] = set()
        self.go = anyio.Semaphore(0)

    async def emit(self, gateway: Incarnation, items: list[tuple[Tokens, AttemptId]]) -> list[bool]:
        await self.go.acquire()
        self.said.append([(tokens.request_id, tokens.index) for tokens, _ in items])
        return [tokens.request_id not in self.stale for tokens, _ in items]

    async def complete(self, fence: Fence, *_: object) -> bool:
        self.said.append([(fence.request_id, -1)])
        return fence.request_id not in self.stale


def parcel(index: int, *names: str, ends: str = "") -> Parcel:
    out = Parcel()
    for name in names:
        out.add(G, Tokens(RequestId(name), 1, 0, index, (index,)), A)
    if ends:
        out.endings.append(Ending(Fence(RequestId(ends), 1, A), G, Finished(RequestId(ends), 1, "stop"), D))
    return out


async def test_what_waits_goes_out_together_and_in_order() -> None:
    """The engine runs ahead of Redis: one call catches up, tokens in order, a request's end after its tokens."""
    leases, stale = SlowLeases(), []
    outbox = Outbox(leases, lambda request_id, epoch: stale.append((request_id, epoch)))  # pyright: ignore
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        outbox.put(parcel(0, "a", "b"))
        await anyio.wait_all_tasks_blocked()
        outbox.put(parcel(1, "a", "b", ends="b"))
        outbox.put(parcel(2, "a"))
        outbox.put(parcel(3, "a", ends="a"))
        assert outbox.num_waiting == 4
        for _ in range(2):
            leases.go.release()
            await anyio.wait_all_tasks_blocked()
        assert outbox.num_waiting == 0
        tasks.cancel_scope.cancel()
    outbox.close()
    assert leases.said == [[("a", 0), ("b", 0)], [("a", 1), ("b", 1), ("a", 2), ("a", 3)], [("b", -1)], [("a", -1)]]
    assert stale == []


async def test_no_call_grows_without_bound_and_the_stale_are_told_once() -> None:
    """However far the engine is ahead; a request that is nobody's any more is reported once per call."""
    leases, stale = SlowLeases(), []
    outbox = Outbox(leases, lambda request_id, epoch: stale.append((request_id, epoch)))  # pyright: ignore
    leases.stale = {"a"}
    async with anyio.create_task_group() as tasks:
        for index in range(3 * MAX_TOGETHER):
            outbox.put(parcel(index, "a", "b"))
        tasks.start_soon(outbox.run)
        for _ in range(3):
            leases.go.release()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    outbox.close()
    assert [len(call) for call in leases.said] == [2 * MAX_TOGETHER] * 3
    assert stale == [("a", 1)] * 3
