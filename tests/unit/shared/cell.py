"""A cell in a real Redis, and requests, workers and placements for its tests."""

from dataclasses import dataclass

from shared.bus import RedisBus
from shared.hashing import chain_root
from shared.ids import AttemptId, Incarnation, RequestId, WorkerId
from shared.keys import Keys
from shared.leases import Dispatch, Fence, Leases
from shared.messages import (
    DecodeTask,
    GenerateRequest,
    PrefillTask,
    Registration,
    SamplingParams,
)
from shared.redis_link import RedisLink
from shared.roster import Roster

R = RequestId("cmpl-1")
GW, P, D = Incarnation("gw1"), Incarnation("p1"), Incarnation("d1")
A1, A2 = AttemptId("a1"), AttemptId("a2")


@dataclass
class Cell:
    leases: Leases
    roster: Roster
    bus: RedisBus
    keys: Keys
    link: RedisLink

    async def seen(self, channel) -> list:
        """Messages that wait on a channel; they are consumed."""
        reader = self.bus.reader(channel)
        deliveries = await reader.next(0.01)
        await reader.ack(deliveries)
        return [message for delivery in deliveries for message in delivery.messages]

    async def taken(self, incarnation: Incarnation = D) -> int:
        return {v.registration.incarnation: v.credit_taken for v in await self.roster.workers()}[incarnation]


def request(request_id: RequestId = R) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        gateway=GW,
        token_ids=(5, 6, 7),
        root_hash=chain_root(),
        block_hashes=(),
        sampling=SamplingParams(max_tokens=4),
    )


def registration(incarnation: Incarnation, role: str, num_blocks: int = 10) -> Registration:
    return Registration(
        worker_id=WorkerId(f"{role}-0"),
        incarnation=incarnation,
        role=role,
        model="m",
        fingerprint="f",
        protocol=1,
        block_size=16,
        num_blocks=num_blocks,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        endpoints=(),
    )


def placement(epoch: int = 1, attempt: AttemptId = A1, credit: int = 4, term: int = 1, request_id: RequestId = R):
    common = {"request_id": request_id, "epoch": epoch, "attempt": attempt, "term": term, "num_prompt_tokens": 3}
    return Dispatch(
        request_id=request_id,
        epoch=epoch,
        attempt=attempt,
        term=term,
        decode=D,
        credit_blocks=credit,
        decode_task=DecodeTask(credit_blocks=credit, **common),
        prefill=P,
        prefill_task=PrefillTask(reader=D, **common),
    )


async def dispatched(cell: Cell, asked: GenerateRequest | None = None) -> Fence:
    """A request on its way to both workers; all streams read empty."""
    await cell.roster.greet(GW)
    await cell.roster.register(registration(P, "prefill"))
    await cell.roster.register(registration(D, "decode"))
    assert await cell.leases.lead(Incarnation("s1")) == 1
    assert await cell.leases.admit(asked or request(), 8) == "admitted"
    assert await cell.leases.dispatch(placement()) == "dispatched"
    await cell.seen(cell.keys.sched())
    return Fence(R, 1, A1)
