"""The index on a bus: who is asked to resend, and what is answered."""

import anyio
import pytest

from services.prefix_index.service import RESEND_AFTER_S, IndexService
from shared.bus_memory import MemoryBus
from shared.clock import ManualClock
from shared.config import PrefixIndexConfig
from shared.ids import Incarnation, WorkerId
from shared.keys import Keys
from shared.messages import Cleared, MatchQuery, MatchReply, Registration, ResendKv, Stored, WorkerGone
from shared.roster import WorkerView
from tests.unit.prefix_index.test_index import A, B, h, kv

pytestmark = pytest.mark.anyio
ASKER = Incarnation("scheduler-1")


def view_of(incarnation: Incarnation) -> WorkerView:
    registration = Registration(
        worker_id=WorkerId(incarnation),
        incarnation=incarnation,
        role="decode",
        model="m",
        fingerprint="f",
        protocol=1,
        block_size=16,
        num_blocks=10,
        max_model_len=100,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        endpoints=(),
    )
    return WorkerView(registration, True, False, 0)


class Roster:
    def __init__(self, *incarnations: Incarnation) -> None:
        self.listed = list(incarnations)

    async def workers(self) -> list[WorkerView]:
        return [view_of(incarnation) for incarnation in self.listed]


class Rig:
    def __init__(self, *incarnations: Incarnation) -> None:
        self.clock, self.keys = ManualClock(), Keys("t")
        self.bus, self.roster = MemoryBus(self.clock), Roster(*incarnations)
        self.service = IndexService(self.bus, self.keys, self.roster, self.clock, PrefixIndexConfig())

    async def asked(self, incarnation: Incarnation) -> int:
        """How often the worker has been asked to resend, since the last look."""
        reader = self.bus.reader(self.keys.control(incarnation))
        deliveries = await reader.next(0)
        await reader.ack(deliveries)
        messages = [m for d in deliveries for m in d.messages]
        assert all(m == ResendKv() for m in messages)
        return len(messages)

    async def match(self, *numbers: int) -> dict[str, int]:
        query = MatchQuery(query_id=7, reply_to=ASKER, fingerprint="f", hashes=h(*numbers))
        await self.bus.publish(self.keys.index(), query)
        await anyio.wait_all_tasks_blocked()
        reader = self.bus.reader(self.keys.reply(ASKER))
        (delivery,) = await reader.next(0)
        await reader.ack([delivery])
        (reply,) = delivery.messages
        assert reply.query_id == 7
        return reply.num_blocks

    async def advance(self, seconds: float, steps: int = 2) -> None:
        """In steps, so that the loop comes round."""
        for _ in range(steps):
            self.clock.advance(seconds / steps)
            await anyio.wait_all_tasks_blocked()


async def test_questions_of_one_asker_are_answered_together() -> None:
    """Answers carry the numbers of their questions, in one entry per asker; nothing stays on the streams."""
    rig = Rig()
    await rig.bus.publish(rig.keys.kv(), kv(A, 1, Stored(hashes=h(1, 2))))
    queries = [
        MatchQuery(query_id=i, reply_to=ASKER, fingerprint="f", hashes=h(*chain))
        for i, chain in enumerate([(1,), (1, 2, 3), (3,)])
    ]
    await rig.bus.publish(rig.keys.index(), *queries)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.service.run)
        await anyio.wait_all_tasks_blocked()
        (delivery,) = await rig.bus.reader(rig.keys.reply(ASKER)).next(0)
        assert delivery.messages == (
            MatchReply(query_id=0, num_blocks={"a": 1}),
            MatchReply(query_id=1, num_blocks={"a": 2}),
            MatchReply(query_id=2, num_blocks={}),
        )
        await rig.advance(1)
        assert rig.bus.depth(rig.keys.kv()) == rig.bus.depth(rig.keys.index()) == 0
        tasks.cancel_scope.cancel()


async def test_after_a_restart_every_live_worker_is_asked() -> None:
    """The index knows nothing at its start, and believes a worker from its `Cleared` on."""
    rig = Rig(A, B)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.service.run)
        await anyio.wait_all_tasks_blocked()
        assert (await rig.asked(A), await rig.asked(B)) == (1, 1)
        await rig.bus.publish(rig.keys.kv(), kv(A, 41, Stored(hashes=h(9))))
        await rig.bus.publish(rig.keys.kv(), kv(A, 42, Cleared(), Stored(hashes=h(1))))
        await anyio.wait_all_tasks_blocked()
        assert await rig.match(1) == {"a": 1}
        assert await rig.match(9) == {}
        tasks.cancel_scope.cancel()


async def test_a_hole_asks_and_asks_again() -> None:
    """A worker that does not answer is asked again after a while, not at each message."""
    rig = Rig(A)
    rig.roster.listed = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.service.run)
        await anyio.wait_all_tasks_blocked()
        rig.roster.listed = [A]
        await rig.bus.publish(rig.keys.kv(), kv(A, 5, Stored(hashes=h(1))))
        for seq in (6, 7, 8):
            await rig.bus.publish(rig.keys.kv(), kv(A, seq, Stored(hashes=h(seq))))
        await anyio.wait_all_tasks_blocked()
        assert await rig.asked(A) == 1
        await rig.advance(RESEND_AFTER_S - 1)
        assert await rig.asked(A) == 0
        await rig.advance(2)
        assert await rig.asked(A) == 1
        await rig.bus.publish(rig.keys.kv(), kv(A, 9, Cleared(), Stored(hashes=h(1))))
        await anyio.wait_all_tasks_blocked()
        await rig.advance(2 * RESEND_AFTER_S)
        assert await rig.asked(A) == 0
        tasks.cancel_scope.cancel()


async def test_the_dead_are_forgotten() -> None:
    """By message at once; without one, as soon as the roster no longer lists them."""
    rig = Rig(A, B)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.service.run)
        await anyio.wait_all_tasks_blocked()
        for incarnation in (A, B):
            await rig.bus.publish(rig.keys.kv(), kv(incarnation, 1, Cleared(), Stored(hashes=h(1))))
        await anyio.wait_all_tasks_blocked()
        assert await rig.match(1) == {"a": 1, "b": 1}
        await rig.bus.publish(rig.keys.kv(), WorkerGone(incarnation=A))
        assert await rig.match(1) == {"b": 1}
        rig.roster.listed = []
        await rig.advance(2)
        assert await rig.match(1) == {}
        tasks.cancel_scope.cancel()


async def test_health_is_progress() -> None:
    """A loop that comes round is well, one that hangs is not."""
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.service.run)
        await anyio.wait_all_tasks_blocked()
        await rig.advance(40, steps=4)
        assert rig.service.health()[0]
        tasks.cancel_scope.cancel()
    await rig.advance(60)
    assert not rig.service.health()[0]
