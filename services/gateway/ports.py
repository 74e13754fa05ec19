"""What the gateway asks of the rest of Baton, and what it tells whoever watches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.ids import RequestId
from shared.messages import FinishReason, GatewayMsg, GenerateRequest, Registration

EndpointName = Literal["completions", "chat", "responses"]
Admission = Literal["admitted", "full", "duplicate"]


class RequestPort(Protocol):
    """The way to the workers. Every method raises BusError once Redis was away for too long."""

    async def admit(self, request: GenerateRequest) -> Admission:
        """Queue the request. `full` and `duplicate` (the id is known already) change nothing."""
        ...

    async def cancel(self, request_id: RequestId, reason: str) -> None:
        """Drop the request, wherever it is. Idempotent; nothing happens if it has ended or never was."""
        ...

    async def cancel_choice(self, request_id: RequestId, epoch: int, choice: int) -> None:
        """One of several choices is complete for its client: no more of it, please. Only a hint."""
        ...

    async def token_log(self, request_id: RequestId, choice: int) -> tuple[int, ...]:
        """All output tokens that were emitted so far: what repairs a gap."""
        ...

    async def next_events(self) -> list[GatewayMsg]:
        """Wait for events of this gateway's requests. The next call acknowledges the last answer."""
        ...

    async def workers(self) -> list[Registration]:
        """The workers that are alive."""
        ...


class Registry(Protocol):
    """What keeps a gateway and its requests known. Every method raises BusError once Redis was away for too long."""

    async def greet(self) -> bool:
        """Say that this gateway lives. True: Redis did not know."""
        ...

    async def states(self, request_ids: Sequence[RequestId]) -> list[Literal["live", "ended", "lost"]]:
        """What Redis says of each request, aligned."""
        ...

    async def queued(self, request_ids: Sequence[RequestId]) -> list[bool]:
        """Whether each waits for a worker, aligned."""
        ...

    async def readmit(self, request: GenerateRequest, epoch: int, *outputs: Sequence[int]) -> Admission:
        """Queue a lost request again, with the tokens already sent, by choice."""
        ...


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One finished request (one prompt of one HTTP request), as the client saw it. Times in seconds."""

    request_id: RequestId
    endpoint: EndpointName
    stream: bool
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    admit_s: float  # arrival to admission: parsing, tokenising, the queue's answer
    ttft_s: float | None  # arrival to first token; None if there was none
    tpot_s: float | None  # (last - first) / (n - 1); None below two tokens
    e2e_s: float  # arrival to the end


class Observer(Protocol):
    """Told of each event as it happens. Must not block and must not raise."""

    def refused(self, status: int, code: str) -> None:
        """An HTTP request got an error instead of an answer."""
        ...

    def admitted(self, num_prompt_tokens: int) -> None: ...

    def first_token(self, ttft_s: float) -> None: ...

    def more_tokens(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` arrived together, `gap_s` after the tokens before them."""
        ...

    def dropped(self, kind: Literal["stale", "repeat"]) -> None:
        """An event of an old epoch, or one that was seen before, was thrown away."""
        ...

    def gap_repaired(self, num_tokens: int) -> None: ...

    def finished(self, summary: RequestSummary) -> None: ...


class NullObserver:
    """Watches nothing."""

    def refused(self, status: int, code: str) -> None: ...

    def admitted(self, num_prompt_tokens: int) -> None: ...

    def first_token(self, ttft_s: float) -> None: ...

    def more_tokens(self, gap_s: float, num_tokens: int) -> None: ...

    def dropped(self, kind: Literal["stale", "repeat"]) -> None: ...

    def gap_repaired(self, num_tokens: int) -> None: ...

    def finished(self, summary: RequestSummary) -> None: ...
