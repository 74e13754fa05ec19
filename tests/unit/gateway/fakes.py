"""A queue without workers, a scripted model, and an observer that remembers."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from services.gateway.ports import Admission, NullObserver, RequestSummary
from shared.errors import BusError
from shared.ids import Incarnation, RequestId, WorkerId
from shared.messages import Finished, FinishReason, GatewayMsg, GenerateRequest, Registration, Role, Tokens
from shared.offload import InlineOffload

T = TypeVar("T")


def worker(role: Role = "decode", max_model_len: int = 2048) -> Registration:
    """A registration, as a live worker's."""
    return Registration(
        worker_id=WorkerId(f"{role}-0"),
        incarnation=Incarnation(role),
        role=role,
        model="fake",
        fingerprint="f",
        protocol=1,
        block_size=16,
        num_blocks=100,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        endpoints=(),
    )


Script = Callable[[GenerateRequest], Sequence[GatewayMsg]]
"""What the workers will send for a request, once it is admitted."""


@dataclass
class FakePort:
    """The gateway's port, in memory. Nothing happens but what `script` says and a test puts into it."""

    script: Script = lambda request: []
    live: list[Registration] = field(default_factory=lambda: [worker("prefill"), worker("decode")])
    capacity: int = 10**9
    broken: bool = False  # every call raises BusError
    admitted: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    stopped: list[tuple[str, int, int]] = field(default_factory=list)  # request, epoch, choice
    logs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logs_of: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by choice, of every request
    log_reads: int = 0

    def __post_init__(self) -> None:
        self._batches: deque[list[GatewayMsg]] = deque()
        self._filled = anyio.Event()
        self.cancel_seen = anyio.Event()
        self.admit_seen = anyio.Event()

    def emit(self, *events: GatewayMsg) -> None:
        """Deliver events together, as one read of the stream gives them."""
        self._batches.append(list(events))
        self._filled.set()

    async def admit(self, request: GenerateRequest) -> Admission:
        await anyio.lowlevel.checkpoint()
        self._check()
        if len(self.admitted) >= self.capacity:
            return "full"
        self.admitted.append(request)
        self.admit_seen.set()
        for event in self.script(request):
            self.emit(event)
        return "admitted"

    async def cancel(self, request_id: RequestId, reason: str) -> None:
        await anyio.lowlevel.checkpoint()
        self._check()
        self.cancelled.append((request_id, reason))
        self.cancel_seen.set()

    async def cancel_choice(self, request_id: RequestId, epoch: int, choice: int) -> None:
        await anyio.lowlevel.checkpoint()
        self._check()
        self.stopped.append((request_id, epoch, choice))

    async def token_log(self, request_id: RequestId, choice: int) -> tuple[int, ...]:
        await anyio.lowlevel.checkpoint()
        self._check()
        self.log_reads += 1
        return self.logs_of.get(choice, ()) or self.logs.get(request_id, ())

    async def next_events(self) -> list[GatewayMsg]:
        if not self._batches:
            self._filled = anyio.Event()
            await self._filled.wait()
        return self._batches.popleft()

    async def workers(self) -> list[Registration]:
        self._check()
        return self.live

    def _check(self) -> None:
        if self.broken:
            raise BusError("redis is away")


def answer(
    token_ids: Sequence[int], reason: FinishReason = "length", num_cached_tokens: int = 0, error: str = ""
) -> Script:
    """A model that says these tokens, one event each, to every request; at most `max_tokens` of them."""

    def script(request: GenerateRequest) -> list[GatewayMsg]:
        said = token_ids[: request.sampling.max_tokens]
        events: list[GatewayMsg] = [Tokens(request.request_id, 1, 0, i, (t,)) for i, t in enumerate(said)]
        return [*events, Finished(request.request_id, 1, reason, len(said), num_cached_tokens, error)]

    return script


@dataclass
class Recorder(NullObserver):
    """Remembers every event, by method name."""

    seen: list[tuple[str, Any]] = field(default_factory=list)

    def refused(self, status: int, code: str) -> None:
        self.seen.append(("refused", (status, code)))

    def admitted(self, num_prompt_tokens: int) -> None:
        self.seen.append(("admitted", num_prompt_tokens))

    def first_token(self, ttft_s: float) -> None:
        self.seen.append(("first_token", ttft_s))

    def more_tokens(self, gap_s: float, num_tokens: int) -> None:
        self.seen.append(("more_tokens", (gap_s, num_tokens)))

    def dropped(self, kind: str) -> None:
        self.seen.append(("dropped", kind))

    def gap_repaired(self, num_tokens: int) -> None:
        self.seen.append(("gap_repaired", num_tokens))

    def finished(self, summary: RequestSummary) -> None:
        self.seen.append(("finished", summary))

    def of(self, name: str) -> list[Any]:
        """The arguments of every call of one method, in order."""
        return [args for kind, args in self.seen if kind == name]


@dataclass
class CountingOffload(InlineOffload):
    """Remembers which functions were sent off the event loop."""

    names: list[str] = field(default_factory=list)

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        self.names.append(fn.__name__)
        return await super().run(fn, *args)
