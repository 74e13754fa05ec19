"""One attempt at one request on a decode worker."""

from dataclasses import dataclass, field
from enum import Enum

import anyio

from services.engine.choices import Choices
from services.engine.specs import seq_ids
from services.engine.types import SeqId
from shared.ids import Incarnation
from shared.leases import Fence
from shared.messages import DecodeTask, RequestState


class Phase(Enum):
    """reserving -> landing -> running, or straight to running where the prompt is computed here."""

    RESERVING = "reserving"
    LANDING = "landing"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Job:
    fence: Fence
    seq_id: SeqId
    task: DecodeTask
    state: RequestState
    choices: Choices
    phase: Phase = Phase.RESERVING
    held: bool = False  # the lease is ours
    num_cached_tokens: int = 0
    unwanted: set[int] = field(default_factory=set)  # choices that the client has all of, and that still run
    fetching: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        """Of the choices, in order."""
        return seq_ids(self.fence.request_id, self.fence.epoch, len(self.choices.num_output))

    @property
    def gateway(self) -> Incarnation:
        return self.state.request.gateway

    @property
    def prefill(self) -> Incarnation | None:
        return self.task.source.incarnation if self.task.source else None
