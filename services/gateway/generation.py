"""One HTTP request's generation: admitted, streamed as text, and cleaned up whatever happens."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import anyio
import structlog

from services.gateway.errors import ApiError, bus_lost, internal, queue_full, server_refused
from services.gateway.mailbox import Item, Mailbox
from services.gateway.ports import Admission, EndpointName, Observer, RequestPort, RequestSummary
from services.gateway.stop_strings import StopMatcher
from services.gateway.streams import RequestStream, Streams
from shared.clock import Clock
from shared.errors import BusError
from shared.messages import Finished, FinishReason, GenerateRequest
from shared.tokenizer import Tokenizer

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice and the tokens that it came with; with a reason, the choice's last."""

    choice: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None  # None: it failed before the worker told

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Services:
    """What a generation needs of the gateway."""

    port: RequestPort
    streams: Streams
    tokenizer: Tokenizer
    clock: Clock
    observer: Observer


class _Choice:
    """One prompt's answer: tokens in, text out, and what will be said of it."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.request = request
        self.reason: FinishReason | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens: int | None = None
        self.stream: RequestStream | None = None
        self.admit_s: float | None = None  # set once admitted
        self._hidden = frozenset(request.sampling.stop_token_ids)
        self._text = tokenizer.detokenizer()
        self._stops = StopMatcher(stops)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text to show. Sets `reason` on a stop string; tokens beyond it do not count."""
        shown: list[str] = []
        for token_id in token_ids:
            self.num_output_tokens += 1
            if token_id in self._hidden:
                continue
            text, hit = self._stops.push(self._text.push(token_id))
            shown.append(text)
            if hit:
                self.reason = "stop"
                break
        return "".join(shown)

    def finish(self, event: Finished) -> str:
        """The last text: what was held back. Sets `reason`."""
        self.reason = event.reason
        self.num_cached_tokens = event.num_cached_tokens
        text, hit = self._stops.push(self._text.flush())
        if hit:
            self.reason = "stop"
        return text if hit else text + self._stops.flush()


Admit = Callable[[GenerateRequest], Awaitable[Admission]]


class Generation:
    """Use as `async with`. Leaving it, by whatever way, cancels what still runs.

    A durable one outlives its gateway: leaving it cancels nothing unless a request failed or `abandon` was called, and
    there is a delta for tokens without text as well.
    """

    def __init__(
        self,
        services: Services,
        requests: Sequence[GenerateRequest],
        stops: Sequence[str],
        *,
        endpoint: EndpointName,
        stream: bool,
        arrived_at: float,
        durable_by: Admit | None = None,
    ) -> None:
        """:param durable_by: makes the generation durable, and admits in place of the port."""
        self._services = services
        self._admit_by = durable_by or services.port.admit
        self._durable = durable_by is not None
        self._choices = [_Choice(request, services.tokenizer, stops) for request in requests]
        self._endpoint: EndpointName = endpoint
        self._stream = stream
        self._arrived_at = arrived_at
        self._mailbox = Mailbox()
        self._failure: ApiError | None = None
        self.failed_by: Finished | None = None  # the first request's end that was a failure
        self.lost = False  # it was this gateway's failure, or a cancel by somebody else: the work itself may go on
        self._gone = "client gone"  # why work is cancelled on leaving early

    async def __aenter__(self) -> "Generation":
        """:raises ApiError: 429 the queue is full, 503 it cannot be reached."""
        try:
            for i, choice in enumerate(self._choices):
                await self._admit(i, choice)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """Complete once `read` has given an empty list."""
        cached = [c.num_cached_tokens for c in self._choices]
        return Usage(
            num_prompt_tokens=sum(len(c.request.token_ids) for c in self._choices),
            num_output_tokens=sum(c.num_output_tokens for c in self._choices),
            num_cached_tokens=None if None in cached else sum(c for c in cached if c is not None),
        )

    async def read(self) -> list[Delta]:
        """The text that came since the last call; waits for some. Empty once every choice has ended.

        :raises ApiError: a request failed. What was read before stays valid.
        """
        ready: list[Delta] = []
        while not ready and self._failure is None and any(choice.reason is None for choice in self._choices):
            for item in await self._mailbox.take():
                choice = self._choices[item.choice]
                delta = self._delta(item, choice) if choice.reason is None else None
                if delta is not None:
                    ready.append(delta)
        if not ready and self._failure is not None:
            raise self._failure
        return ready

    def abandon(self, reason: str) -> None:
        """Let leaving cancel what still runs, although the generation is durable."""
        self._durable, self._gone = False, reason

    async def _admit(self, index: int, choice: _Choice) -> None:
        services, request = self._services, choice.request
        choice.stream = services.streams.open(request.request_id, index, self._mailbox, self._arrived_at)
        choice.stream.durable = self._durable
        # Shielded: a half-sent admission could reach the queue after the cancel that follows it.
        answer: Admission | None = None
        try:
            with anyio.CancelScope(shield=True):
                answer = await self._admit_by(request)
        except BusError:
            raise bus_lost() from None  # it may have been admitted all the same: closing cancels it
        if answer == "full":
            choice.stream.ended_upstream = True
            self._gone = "sibling refused"
            raise queue_full()
        # The id is 128 random bits, so a duplicate is this same admission, sent twice over a lost connection.
        choice.stream.request = request
        choice.admit_s = services.clock.now() - self._arrived_at
        services.observer.admitted(len(request.token_ids))

    def _delta(self, item: Item, choice: _Choice) -> Delta | None:
        if item.finished is None:
            before = choice.num_output_tokens
            text = choice.push(item.token_ids)
            token_ids = tuple(item.token_ids[: choice.num_output_tokens - before])
            if choice.reason is not None:
                assert choice.stream is not None
                choice.num_cached_tokens = choice.stream.num_cached_tokens
                self._services.streams.close(choice.stream, cancel="stop string")
                return Delta(item.choice, text, "stop", token_ids)
            return Delta(item.choice, text, None, token_ids) if text or self._durable else None
        text = choice.finish(item.finished)
        if choice.reason in ("stop", "length"):
            return Delta(item.choice, text, choice.reason)
        self._fail(item.finished, choice)
        return Delta(item.choice, text) if text else None

    def _fail(self, finished: Finished, choice: _Choice) -> None:
        if self._failure is not None:
            return
        self._failure, self.failed_by = _failure(finished), finished
        assert choice.stream is not None
        self.lost = not choice.stream.ended_upstream or finished.reason == "cancelled"
        if not self.lost or not self._durable:
            self.abandon((finished.reason == "cancelled" and finished.error) or "sibling failed")

    def _close(self) -> None:
        for choice in self._choices:
            if choice.stream is None:
                continue
            self._services.streams.close(choice.stream, cancel="" if self._durable else self._gone)
            if choice.admit_s is not None:
                self._report(choice, choice.stream, choice.admit_s)
            choice.stream = None

    def _report(self, choice: _Choice, stream: RequestStream, admit_s: float) -> None:
        timing = stream.timing
        summary = RequestSummary(
            request_id=choice.request.request_id,
            endpoint=self._endpoint,
            stream=self._stream,
            reason=choice.reason or "cancelled",
            num_prompt_tokens=len(choice.request.token_ids),
            num_output_tokens=choice.num_output_tokens,
            num_cached_tokens=choice.num_cached_tokens or 0,
            admit_s=admit_s,
            ttft_s=None if timing.first_at is None else timing.first_at - self._arrived_at,
            tpot_s=timing.tpot_s,
            e2e_s=self._services.clock.now() - self._arrived_at,
        )
        self._services.observer.finished(summary)
        log.info("finished", **{name: getattr(summary, name) for name in summary.__slots__})


def _failure(event: Finished) -> ApiError:
    if event.reason == "cancelled":
        return server_refused(event.error)
    log.error("request failed", request_id=event.request_id, error=event.error)
    return internal()
