"""Token streams: from the gateway's one event stream into the mailboxes of the HTTP requests.

`RequestStream.accept` owns the order of one request's tokens: whatever is stale or was seen before is
dropped, a hole is repaired from the token log, and there is exactly one end. `Streams` runs the one task
that drains the events. That task waits for nothing but events: repairs and cancels run beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import structlog
from anyio.abc import TaskGroup

from services.gateway.mailbox import Mailbox
from services.gateway.ports import Observer, RequestPort
from shared.clock import Clock
from shared.errors import BatonError, StreamGap
from shared.ids import RequestId
from shared.messages import EpochRaised, Finished, GatewayMsg, GenerateRequest, TokenLogprobs, Tokens

CANCEL_S = 2.0  # a try to cancel may take so long, at shutdown too; should it fail then, the reaper sees to the rest
RETRY_S = 0.5  # pause after the bus failed
MAX_REPAIRS = 3  # of one gap, before the request fails
MAX_PARKED = 4096  # events of one request kept while its gap is repaired

log = structlog.get_logger("gateway.streams")


@dataclass(slots=True)
class Timing:
    """When the tokens of a stream arrived at this gateway, on its clock."""

    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0

    @property
    def tpot_s(self) -> float | None:
        if self.first_at is None or self.last_at is None or self.num_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_tokens - 1)


class RequestStream:
    """One request's tokens, in order and once. Open until a `Finished` was accepted or `fail` called."""

    def __init__(
        self,
        request_id: RequestId,
        choice: int,
        mailbox: Mailbox,
        arrived_at: float,
        observer: Observer,
        num_choices: int = 1,
    ) -> None:
        """:param choice: index of the request's first choice in the HTTP response."""
        self.request_id = request_id
        self.timing = Timing()
        self.is_open = True
        self.ended_upstream = False  # nobody works on it any more: no cancel is needed
        self.parked: list[GatewayMsg] | None = None  # a repair runs; later events wait here
        self.request: GenerateRequest | None = None  # once it is admitted
        self.durable = False  # it goes on without this gateway, and waits however long
        self.outputs: list[list[int]] = [[] for _ in range(num_choices)]  # tokens received, by choice
        self.epoch = 0
        self._choice = choice
        self._mailbox = mailbox
        self._arrived_at = arrived_at
        self._observer = observer
        self.num_cached_tokens = 0

    def accept(self, event: GatewayMsg, now: float) -> None:
        """Take in one event. The event may be accepted again after the gap that it showed is repaired.

        :raises StreamGap: tokens before this event are missing; nothing was taken in.
        """
        if not self.is_open or event.epoch < self.epoch:
            self._observer.dropped("stale")
            return
        self.epoch = event.epoch
        match event:
            case Tokens():
                self._accept_tokens(event, now)
            case EpochRaised():
                self._need(event.num_output_tokens, *event.others)
            case Finished():
                if event.reason in ("stop", "length"):
                    self._need(event.num_output_tokens, *event.others)
                self.ended_upstream = True
                self._end(event)

    def accept_log(self, token_ids: Sequence[int], now: float, choice: int = 0) -> None:
        """Take in what a choice's token log has beyond the tokens received so far. The log has no logprobs: a request
        that wants them fails."""
        missing = list(token_ids[len(self.outputs[choice]) :])
        if self.is_open and missing:
            self._observer.gap_repaired(len(missing))
            sampling = self.request.sampling if self.request else None
            if sampling and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
                self.fail("log-probabilities were lost")
                return
            self._take(choice, missing, now)

    @property
    def token_ids(self) -> list[int]:
        """Of choice 0."""
        return self.outputs[0]

    @property
    def arrived_at(self) -> float:
        return self._arrived_at

    def refuse(self, why: str) -> None:
        """End the request, unless it has ended, as one that the server does not go on with.

        :param why: a key of `services.gateway.errors.REFUSALS`.
        """
        if self.is_open:
            self._end(Finished(self.request_id, self.epoch, "cancelled", error=why))

    def fail(self, error: str) -> None:
        """End the request with an error, unless it has ended."""
        if self.is_open:
            self._end(Finished(self.request_id, self.epoch, "error", error=error))

    def _accept_tokens(self, event: Tokens, now: float) -> None:
        have = len(self.outputs[event.choice])
        if event.index > have:
            raise StreamGap(self.request_id, have, event.index)
        fresh = list(event.token_ids[have - event.index :])
        if not fresh:
            self._observer.dropped("repeat")
            return
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self._take(event.choice, fresh, now, event.logprobs[have - event.index :], event.prompt_logprobs)

    def _need(self, *num_output_tokens: int) -> None:
        for output, wanted in zip(self.outputs, num_output_tokens, strict=False):
            if wanted > len(output):
                raise StreamGap(self.request_id, len(output), wanted)

    def _take(
        self,
        choice: int,
        token_ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        self.outputs[choice] += token_ids
        timing = self.timing
        if timing.first_at is None or timing.last_at is None:
            timing.first_at = now
            self._observer.first_token(now - self._arrived_at)
        else:
            self._observer.more_tokens(now - timing.last_at, len(token_ids))
        timing.last_at = now
        timing.num_tokens += len(token_ids)
        self._mailbox.put(self._choice + choice, token_ids, logprobs, prompt_logprobs)

    def _end(self, finished: Finished) -> None:
        self.is_open = False
        for choice in range(len(self.outputs)):
            self._mailbox.finish(self._choice + choice, finished)


class Streams:
    """All open streams of this gateway, by request. `run` must be running."""

    def __init__(self, port: RequestPort, clock: Clock, observer: Observer) -> None:
        self._port = port
        self._clock = clock
        self._observer = observer
        self._streams: dict[RequestId, RequestStream] = {}
        self._tasks: TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def open(
        self, request_id: RequestId, choice: int, mailbox: Mailbox, arrived_at: float, num_choices: int = 1
    ) -> RequestStream:
        """A stream for a request about to be admitted: open first, so that no event can be missed."""
        assert request_id not in self._streams
        stream = RequestStream(request_id, choice, mailbox, arrived_at, self._observer, num_choices)
        self._streams[request_id] = stream
        return stream

    def admitted(self) -> list[RequestStream]:
        """Open streams whose requests were admitted."""
        return [s for s in self._streams.values() if s.is_open and s.request is not None]

    def look(self) -> list[dict[str, object]]:
        """What an operator may know of the open requests: no text, no tokens."""
        return [
            {
                "request_id": s.request_id,
                "tenant": s.request.tenant if s.request else "",
                "epoch": s.epoch,
                "num_prompt_tokens": len(s.request.token_ids) if s.request else 0,
                "num_output_tokens": sum(map(len, s.outputs)),
                "gap": s.parked is not None,
            }
            for s in self._streams.values()
        ]

    def refuse_all(self, why: str) -> None:
        """End all open streams but the durable ones, as `RequestStream.refuse`."""
        for stream in list(self._streams.values()):
            if not stream.durable:
                stream.refuse(why)

    def close(self, stream: RequestStream, *, cancel: str = "") -> None:
        """Forget the stream; later events are dropped. With a reason in `cancel`, the work upstream is
        cancelled too unless it has ended: at once, in a task of its own, so that a caller who is being
        cancelled need not wait."""
        self._streams.pop(stream.request_id, None)
        stream.is_open = False
        if cancel and not stream.ended_upstream and self._tasks is not None:
            stream.ended_upstream = True
            self._tasks.start_soon(self._cancel, stream.request_id, cancel)

    def stop_choice(self, stream: RequestStream, choice: int) -> None:
        """Nobody wants more of this choice, while others go on: the worker is told, beside. Should it not hear it, what
        it says in vain shows that."""
        if self._tasks is not None and not stream.ended_upstream:
            self._tasks.start_soon(self._stop_choice, stream.request_id, stream.epoch, choice)

    async def run(self) -> None:
        """Drain events, for as long as the gateway lives."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                while True:
                    await self._drain_once()
            finally:
                self._tasks = None

    async def _drain_once(self) -> None:
        try:
            events = await self._port.next_events()
        except Exception as exc:  # mostly BusError; and a gateway that does not drain would hang every client
            await self._lost_bus(exc)
            return
        now = self._clock.now()
        for event in events:
            self._deliver(event, now)

    async def _lost_bus(self, exc: Exception) -> None:
        """The bus retries by itself; where it gives up, so do the requests that wait."""
        log.error("events cannot be read", error=repr(exc), num_failed=len(self._streams))
        for stream in list(self._streams.values()):
            stream.fail("the token stream was lost")
        await self._clock.sleep(RETRY_S)

    def _deliver(self, event: GatewayMsg, now: float) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if stream.parked is not None:
            if len(stream.parked) < MAX_PARKED:
                stream.parked.append(event)
            else:
                stream.fail("tokens were lost")
            return
        try:
            stream.accept(event, now)
        except StreamGap as gap:
            log.warning("gap", request_id=gap.request_id, want=gap.want, got=gap.got)
            stream.parked = [event]
            assert self._tasks is not None
            self._tasks.start_soon(self._repair, stream)
        except Exception as exc:  # a bad event ends its own request, never the drain
            log.error("bad event", request_id=event.request_id, error=repr(exc))
            stream.fail("the server received a bad event")

    async def _repair(self, stream: RequestStream) -> None:
        """Fill a gap from the token log, then go on with what arrived meanwhile."""
        try:
            for _ in range(MAX_REPAIRS):
                logs = [await self._port.token_log(stream.request_id, c) for c in range(len(stream.outputs))]
                now = self._clock.now()
                for choice, token_ids in enumerate(logs):
                    stream.accept_log(token_ids, now, choice)
                if self._replay(stream, now):
                    return
            log.error("gap not repaired", request_id=stream.request_id)
        except Exception as exc:  # as in _deliver
            log.error("gap not repaired", request_id=stream.request_id, error=repr(exc))
        stream.parked = None
        stream.fail("tokens were lost")

    def _replay(self, stream: RequestStream, now: float) -> bool:
        """Accept the parked events; False if there is another gap, with the rest parked again."""
        parked = stream.parked or []
        for i, event in enumerate(parked):
            try:
                stream.accept(event, now)
            except StreamGap:
                stream.parked = parked[i:]
                return False
        stream.parked = None
        return True

    async def _stop_choice(self, request_id: RequestId, epoch: int, choice: int) -> None:
        try:
            await self._port.cancel_choice(request_id, epoch, choice)
        except BatonError as exc:
            log.warning("choice not stopped", request_id=request_id, choice=choice, error=str(exc))

    async def _cancel(self, request_id: RequestId, reason: str) -> None:
        """Until Redis has taken it: nobody else knows that the client is gone. At this gateway's end once more, and
        not for long."""
        while True:
            with anyio.move_on_after(CANCEL_S, shield=True):
                try:
                    await self._port.cancel(request_id, reason)
                    return
                except BatonError as exc:
                    log.warning("cancel failed", request_id=request_id, error=str(exc))
            await self._clock.sleep(RETRY_S)
