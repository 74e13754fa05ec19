"""A cell in memory, as the scheduler sees it: the answers that the scripts in Redis give, on a clock of the test's."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shared.bus_memory import MemoryBus
from shared.clock import Clock
from shared.errors import BusError
from shared.hashing import block_hashes, chain_root
from shared.ids import Incarnation, RequestId, WorkerId
from shared.keys import Channel, Keys
from shared.leases import FOREVER_MS, Dispatch, DispatchAnswer, RequeueAnswer
from shared.messages import (
    Admitted,
    CreditFreed,
    Ended,
    GenerateRequest,
    Registration,
    RequestState,
    Role,
    SamplingParams,
    WorkerJoined,
)
from shared.roster import WorkerView

GATEWAY = Incarnation("gateway-0")


def request_of(name: str, num_tokens: int = 40, max_tokens: int = 32, priority: int = 0) -> GenerateRequest:
    tokens = tuple(range(num_tokens))
    root = chain_root()
    return GenerateRequest(
        request_id=RequestId(name),
        gateway=GATEWAY,
        token_ids=tokens,
        root_hash=root,
        block_hashes=block_hashes(root, tokens, 16),
        sampling=SamplingParams(max_tokens=max_tokens),
        priority=priority,
    )


def registration_of(name: str, role: Role, num_blocks: int = 100, fingerprint: str = "f") -> Registration:
    return Registration(
        worker_id=WorkerId(name),
        incarnation=Incarnation(name),
        role=role,
        model="m",
        fingerprint=fingerprint,
        protocol=1,
        block_size=16,
        num_blocks=num_blocks,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        endpoints=(),
    )


@dataclass
class Record:
    request: GenerateRequest
    epoch: int = 1
    state: Literal["queued", "dispatched", "done"] = "queued"
    tries: int = 0
    output: tuple[int, ...] = ()
    dispatch: Dispatch | None = None
    error: str = ""


@dataclass
class Worker:
    registration: Registration
    state: Literal["up", "draining", "dead"] = "up"
    heard: bool = True  # heartbeats arrive
    taken: int = 0
    held: dict[tuple[RequestId, int], int] = field(default_factory=dict)


class Cell:
    """Requests and workers; implements the scheduler's ports. `down` makes every call fail."""

    def __init__(self, clock: Clock) -> None:
        self.bus, self.keys, self.clock = MemoryBus(clock), Keys("t"), clock
        self.time_jump_s = 0.0  # how far Redis' clock was set forward
        self.records: dict[RequestId, Record] = {}
        self.fleet: dict[Incarnation, Worker] = {}
        self.overdue: list[tuple[RequestId, int]] = []  # what `expired` answers
        self.silent_gateways: dict[Incarnation, list[RequestId]] = {}  # overdue, with what they have open
        self.term = 0
        self.down = False
        self.last_outage: float | None = None
        self.order: list[RequestId] = []  # of dispatches
        self.calls: dict[str, int] = {}

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.down:
            raise BusError("redis does not answer")

    # --- what gateway and workers do ---

    async def admit(self, request: GenerateRequest) -> None:
        self.records[request.request_id] = Record(request)
        await self.bus.publish(self.keys.sched(), Admitted(request_id=request.request_id, epoch=1))

    async def join(self, registration: Registration) -> Incarnation:
        self.fleet[registration.incarnation] = Worker(registration)
        await self.bus.publish(self.keys.sched(), WorkerJoined(incarnation=registration.incarnation))
        return registration.incarnation

    async def end(self, name: str) -> None:
        """The request is done: credit back, `Ended` out."""
        record = self.records[RequestId(name)]
        record.state = "done"
        for worker in self.fleet.values():
            worker.taken -= worker.held.pop((record.request.request_id, record.epoch), 0)
        await self.bus.publish(self.keys.sched(), Ended(request_id=record.request.request_id))

    async def refund(self, name: str, blocks: int) -> None:
        record = self.records[RequestId(name)]
        assert record.dispatch
        worker = self.fleet[record.dispatch.decode]
        worker.held[record.request.request_id, record.epoch] -= blocks
        worker.taken -= blocks
        await self.bus.publish(self.keys.sched(), CreditFreed(incarnation=record.dispatch.decode))

    def hand_over(self, name: str) -> None:
        """Decode has accepted: the prefill worker is done with it."""
        record = self.records[RequestId(name)]
        assert record.dispatch
        assert record.dispatch.prefill
        del self.fleet[record.dispatch.prefill].held[record.request.request_id, record.epoch]

    def placed(self, name: str) -> tuple[str | None, str] | None:
        """(prefill, decode) of a dispatched request."""
        d = self.records[RequestId(name)].dispatch
        return (d.prefill, d.decode) if d else None

    # --- the ports ---

    async def lead(self, incarnation: Incarnation) -> int:
        self._called("lead")
        self.term += 1
        return self.term

    async def load(self, request_id: RequestId) -> RequestState | None:
        self._called("load")
        record = self.records.get(request_id)
        if record is None or record.state == "done":
            return None
        return RequestState(request=record.request, epoch=record.epoch, output=record.output)

    async def queued(self) -> list[Admitted]:
        self._called("queued")
        return [
            Admitted(request_id=request_id, epoch=record.epoch)
            for request_id, record in self.records.items()
            if record.state == "queued"
        ]

    async def dispatch(self, d: Dispatch) -> DispatchAnswer:
        self._called("dispatch")
        record = self.records[d.request_id]
        decode, prefill = self.fleet.get(d.decode), self.fleet.get(d.prefill) if d.prefill else None
        if d.term != self.term:
            return "deposed"
        if record.state != "queued" or record.epoch != d.epoch:
            return "stale"
        if decode is None or decode.state != "up" or (d.prefill and (prefill is None or prefill.state != "up")):
            return "worker_gone"
        if decode.taken + d.credit_blocks > decode.registration.num_blocks:
            return "no_credit"
        decode.taken += d.credit_blocks
        decode.held[d.request_id, d.epoch] = d.credit_blocks
        if prefill is not None:
            prefill.held[d.request_id, d.epoch] = 0
        record.state, record.dispatch = "dispatched", d
        self.order.append(d.request_id)
        return "dispatched"

    async def expired(self) -> list[tuple[RequestId, int]]:
        self._called("expired")
        return self.overdue

    async def requeue(
        self,
        request_id: RequestId,
        epoch: int,
        reason: str,
        max_attempts: int,
        lost: str = "",
        until_ms: int = FOREVER_MS,
    ) -> RequeueAnswer:
        self._called("requeue")
        record = self.records[request_id]
        if not lost and self._now_ms() > until_ms:
            return "stale"
        if record.state != "dispatched" or record.epoch != epoch:
            return "stale"
        if record.tries + 1 >= max_attempts:
            record.state, record.error = "done", reason
            await self.bus.publish(self.keys.sched(), Ended(request_id=request_id))
            return "failed"
        record.epoch, record.state, record.dispatch, record.tries = epoch + 1, "queued", None, record.tries + 1
        await self.bus.publish(self.keys.sched(), Admitted(request_id=request_id, epoch=record.epoch))
        return "requeued"

    async def fail(self, request_id: RequestId, epoch: int, error: str) -> bool:
        self._called("fail")
        record = self.records[request_id]
        if record.state != "queued" or record.epoch != epoch:
            return False
        record.state, record.error = "done", error
        await self.bus.publish(self.keys.sched(), Ended(request_id=request_id))
        return True

    async def cancel(self, request_id: RequestId, reason: str) -> bool:
        self._called("cancel")
        record = self.records[request_id]
        if record.state == "done":
            return False
        record.state, record.error = "done", reason
        await self.bus.publish(self.keys.sched(), Ended(request_id=request_id))
        return True

    async def dead_gateways(self) -> list[Incarnation]:
        self._called("dead_gateways")
        return list(self.silent_gateways)

    async def bury_gateway(self, gateway: Incarnation, until_ms: int) -> list[RequestId] | None:
        self._called("bury_gateway")
        return self.silent_gateways.get(gateway) if self._now_ms() <= until_ms else None

    async def forget_gateway(self, gateway: Incarnation) -> None:
        self._called("forget_gateway")
        del self.silent_gateways[gateway]

    async def pull_in_deadlines(self, lease_s: float) -> int:
        self._called("pull_in_deadlines")
        return 0

    async def stream_lengths(self, *channels: Channel[Any]) -> list[int]:
        self._called("stream_lengths")
        return [self.bus.depth(channel) for channel in channels]

    async def redis_now_ms(self) -> int:
        self._called("redis_now_ms")
        return self._now_ms()

    def _now_ms(self) -> int:
        return int((self.clock.now() + self.time_jump_s) * 1000)

    async def deployment_key(self) -> bytes:
        self._called("deployment_key")
        return b"k" * 32

    async def workers(self) -> list[WorkerView]:
        self._called("workers")
        return [
            WorkerView(w.registration, w.heard and w.state != "dead", w.state == "draining", w.taken)
            for w in self.fleet.values()
        ]

    async def held(self, incarnation: Incarnation) -> list[tuple[RequestId, int]]:
        self._called("held")
        return list(self.fleet[incarnation].held) if incarnation in self.fleet else []

    async def dead_workers(self) -> list[Incarnation]:
        self._called("dead_workers")
        return [i for i, w in self.fleet.items() if not w.heard]

    async def bury(self, incarnation: Incarnation, until_ms: int) -> list[tuple[RequestId, int]] | None:
        self._called("bury")
        worker = self.fleet[incarnation]
        if worker.heard or self._now_ms() > until_ms:
            return None
        self.fleet[incarnation] = replace(worker, state="dead")
        return list(worker.held)

    async def forget(self, incarnation: Incarnation) -> None:
        self._called("forget")
        del self.fleet[incarnation]
