"""One HTTP request's generation: admitted, streamed as text, and cleaned up whatever happens."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import anyio
import structlog

from services.gateway.choice import Choice, Delta, Shown
from services.gateway.errors import ApiError, bus_lost, internal, queue_full, server_refused
from services.gateway.mailbox import Item, Mailbox
from services.gateway.ports import Admission, EndpointName, Observer, RequestPort, RequestSummary
from services.gateway.streams import RequestStream, Streams
from shared.clock import Clock
from shared.errors import BusError
from shared.messages import Finished, GenerateRequest, TokenLogprobs
from shared.tokenizer import Tokenizer

RETELL_S = 1.0
"""A worker that goes on with a choice that is cut is told again after so long."""

log = structlog.get_logger("gateway")


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


@dataclass(slots=True, eq=False)
class _Asked:
    """One prompt: a request of one or more choices."""

    request: GenerateRequest
    choices: list[Choice]
    stream: RequestStream | None = None
    admit_s: float | None = None  # set once admitted
    num_cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_output_tokens for choice in self.choices)


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
        shown: Shown,
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
        self._asked: list[_Asked] = []
        self._of_choice: list[_Asked] = []  # by index in the response
        self._choices: list[Choice] = []
        for request in requests:
            first = len(self._choices)
            choices = [Choice(request, i, first + i, services.tokenizer, shown) for i in range(request.num_choices)]
            self._asked.append(_Asked(request, choices))
            self._of_choice += [self._asked[-1]] * len(choices)
            self._choices += choices
        self._eager = shown.logprobs or self._durable  # a delta for tokens without text as well
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
            for asked in self._asked:
                await self._admit(asked)
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
        cached = [a.num_cached_tokens for a in self._asked]
        return Usage(
            num_prompt_tokens=sum(len(a.request.token_ids) for a in self._asked),
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
                if choice.is_cut:
                    self._stop(choice)
        if not ready and self._failure is not None:
            raise self._failure
        return ready

    def abandon(self, reason: str) -> None:
        """Let leaving cancel what still runs, although the generation is durable."""
        self._durable, self._gone = False, reason

    async def _admit(self, asked: _Asked) -> None:
        services, request = self._services, asked.request
        first = asked.choices[0].index
        asked.stream = services.streams.open(
            request.request_id, first, self._mailbox, self._arrived_at, request.num_choices
        )
        asked.stream.durable = self._durable
        # Shielded: a half-sent admission could reach the queue after the cancel that follows it.
        answer: Admission | None = None
        try:
            with anyio.CancelScope(shield=True):
                answer = await self._admit_by(request)
        except BusError:
            raise bus_lost() from None  # it may have been admitted all the same: closing cancels it
        if answer == "full":
            asked.stream.ended_upstream = True
            self._gone = "sibling refused"
            raise queue_full()
        # The id is 128 random bits, so a duplicate is this same admission, sent twice over a lost connection.
        asked.stream.request = request
        asked.admit_s = services.clock.now() - self._arrived_at
        services.observer.admitted(len(request.token_ids))

    def _delta(self, item: Item, choice: Choice) -> Delta | None:
        asked = self._of_choice[item.choice]
        asked.prompt_logprobs = item.prompt_logprobs or asked.prompt_logprobs
        if item.finished is not None:
            return self._last_delta(item.finished, asked, choice)
        delta = choice.push(item.token_ids, item.logprobs, asked.prompt_logprobs)
        if choice.reason is not None and all(one.reason is not None for one in asked.choices):
            assert asked.stream is not None
            asked.num_cached_tokens = asked.stream.num_cached_tokens
            self._services.streams.close(
                asked.stream, cancel="stop string" if any(c.is_cut for c in asked.choices) else ""
            )
        return delta if delta.text or delta.finish_reason or delta.logged or self._eager else None

    def _stop(self, choice: Choice) -> None:
        """Its worker is told that the choice is cut while others go on. It is told again if it is heard to go on with
        it all the same: by the next word of another epoch, or later, as a hint may be lost."""
        stream, now = self._of_choice[choice.index].stream, self._services.clock.now()
        if stream is None or not stream.is_open:
            return
        if choice.told_epoch < stream.epoch or now - choice.told_at >= RETELL_S:
            choice.told_epoch, choice.told_at = stream.epoch, now
            self._services.streams.stop_choice(stream, choice.number)

    def _last_delta(self, finished: Finished, asked: _Asked, choice: Choice) -> Delta | None:
        asked.num_cached_tokens = finished.num_cached_tokens
        delta = choice.finish(finished)
        if delta.finish_reason is not None:
            return delta
        self._fail(finished, asked)
        return delta if delta.text else None

    def _fail(self, finished: Finished, asked: _Asked) -> None:
        if self._failure is not None:
            return
        self._failure, self.failed_by = _failure(finished), finished
        assert asked.stream is not None
        self.lost = not asked.stream.ended_upstream or finished.reason == "cancelled"
        if not self.lost or not self._durable:
            self.abandon((finished.reason == "cancelled" and finished.error) or "sibling failed")

    def _close(self) -> None:
        for asked in self._asked:
            if asked.stream is None:
                continue
            self._services.streams.close(asked.stream, cancel="" if self._durable else self._gone)
            if asked.admit_s is not None:
                self._report(asked, asked.stream, asked.admit_s)
            asked.stream = None

    def _report(self, asked: _Asked, stream: RequestStream, admit_s: float) -> None:
        timing = stream.timing
        summary = RequestSummary(
            request_id=asked.request.request_id,
            endpoint=self._endpoint,
            stream=self._stream,
            reason=asked.choices[0].reason or "cancelled",
            num_prompt_tokens=len(asked.request.token_ids),
            num_output_tokens=asked.num_output_tokens,
            num_cached_tokens=asked.num_cached_tokens or 0,
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
