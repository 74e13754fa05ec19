"""One submission of the Redis queue: from its entry to the end of its result, whatever breaks on the way.

An attempt opens the submission, prepares it as an HTTP request would be, admits it (or goes on with what an earlier
attempt, here or at a gateway that is gone, admitted) and writes what comes. Text is a pure function of the tokens, so
an attempt replays the token log from its start and writes only what the result does not have yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import anyio
import msgspec
import structlog

from services.gateway.answers import empty_answers
from services.gateway.body import decode_object
from services.gateway.choice import Delta
from services.gateway.endpoints import Endpoint, Parts, Prepared
from services.gateway.errors import ApiError, bad_field, internal
from services.gateway.fields import Fields
from services.gateway.generation import Generation
from services.gateway.params import Params
from services.gateway.ports import Admission
from shared.errors import BusError
from shared.ids import RequestId
from shared.leases import AdmitAnswer
from shared.messages import GenerateRequest
from shared.randomness import SeededRandomness
from shared.submissions import AdoptAnswer, End, Progress, ResultItem, Submission, WriteAnswer

log = structlog.get_logger("gateway.queue")

MAX_TRIES = 8
"""Attempts in a row without a token, at all gateways together; more than that is a poisoned submission."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0


class Results(Protocol):
    """What a job needs of `shared.submissions.Submissions`. Every method raises BusError."""

    async def open(self, s: Submission) -> Progress | None: ...

    async def adopt(self, s: Submission, request: GenerateRequest) -> AdoptAnswer: ...

    async def written(self, s: Submission) -> Mapping[int, Sequence[int]]: ...

    async def write(self, s: Submission, items: Sequence[ResultItem]) -> WriteAnswer: ...

    async def end(self, s: Submission, end: End) -> bool: ...


class Admitter(Protocol):
    async def admit(
        self, request: GenerateRequest, max_queued: int, epoch: int, outputs: Sequence[Sequence[int]]
    ) -> AdmitAnswer: ...


@dataclass(slots=True)
class QueueCounts:
    """Submissions since the start, and now."""

    open: int = 0
    taken: int = 0
    answered: int = 0
    refused: int = 0  # ended with an error that is the client's
    dead: int = 0
    repeats: int = 0
    lost: int = 0  # to another gateway
    waits: int = 0  # for room in the queue, a worker or Redis
    restarts: int = 0  # attempts that broke off


@dataclass(frozen=True, slots=True)
class JobParts:
    """What all jobs of a gateway share."""

    parts: Parts
    endpoints: Mapping[str, Endpoint]
    results: Results
    leases: Admitter
    counts: QueueCounts


class _Again(Exception):
    """The attempt broke; the work has not."""


class _Taken(Exception):
    """Another gateway has the submission, or it has ended."""


class _Dead(Exception):
    """The submission has failed for good, and not by a mistake of its client that HTTP would answer too."""

    def __init__(self, reason: str, answer: ApiError) -> None:
        super().__init__(reason)
        self.answer = answer


_OUTCOMES = (_Again, _Taken, _Dead, ApiError, BusError)


@dataclass(slots=True)
class _Text:
    """A choice as far as this attempt has seen it."""

    num_tokens: int = 0
    chars: int = 0

    def item(self, delta: Delta, out_tokens: int, out_chars: int) -> ResultItem | None:
        """Take in a delta; what of it is not out yet."""
        first, chars_before = self.num_tokens, self.chars
        self.num_tokens += len(delta.token_ids)
        self.chars += len(delta.text)
        if self.num_tokens <= out_tokens and self.chars <= out_chars:
            return None
        offset = min(max(first, out_tokens), self.num_tokens)
        text = delta.text[max(0, out_chars - chars_before) :]
        return ResultItem(delta.choice, offset, delta.token_ids[offset - first :], text, self.chars)


class QueueJob:
    """Owns one submission at this gateway, until `run` returns."""

    def __init__(self, submission: Submission, shared: JobParts) -> None:
        self.submission = submission
        self.scope = anyio.CancelScope()  # cancelled by whoever learns that the submission is another's
        self.opened = False
        self._shared, self._clock = shared, shared.parts.services.clock
        self._max_queued = max(1, shared.parts.config.max_queued // 2)  # the other half is for HTTP, which cannot wait
        self._arrived_at = self._clock.now()
        self._has_token = False
        self._overdue = False
        self._prepared: Prepared | None = None
        self._is_first = True  # nothing was ever admitted for it
        self._submitted_at = self._arrived_at  # when its entry was written, by our clock
        self._written: Mapping[int, Sequence[int]] | None = None  # as it was when this attempt began

    async def run(self) -> None:
        """Serve the submission to its end, or until another gateway has it. Raises nothing."""
        s, counts = self.submission, self._shared.counts
        pause = FIRST_PAUSE_S
        with self.scope:
            while True:
                try:
                    await self._attempt()
                    return
                except _Taken:
                    counts.lost += 1
                    log.info("submission.lost", id=s.id, entry=s.entry)
                    return
                except BusError as exc:
                    counts.waits += 1
                    log.warning("submission.waits", id=s.id, why=str(exc))
                except _Again as exc:
                    counts.restarts += 1
                    log.warning("submission.restarts", id=s.id, why=str(exc))
                except Exception as exc:
                    counts.restarts += 1
                    log.exception("submission.crashed", id=s.id, error=repr(exc))
                pause = await self._sleep(pause)

    async def _sleep(self, pause: float) -> float:
        """Wait about so long; the next pause."""
        await self._clock.sleep(pause * (0.5 + self._shared.parts.randomness.uniform()))
        return min(2 * pause, LAST_PAUSE_S)

    async def _attempt(self) -> None:
        """:raises BusError, _Again, _Taken: this attempt did not end it."""
        progress = await self._shared.results.open(self.submission)
        if progress is None:
            self._shared.counts.repeats += 1
            return
        self.opened, self._has_token = True, any(progress.tokens.values())
        self._is_first = progress.tries == 1 and not progress.tokens  # text alone is out with 0 tokens
        self._submitted_at, self._written = self._clock.now() - max(0, progress.age_ms) / 1000, None
        try:
            answer = await self._answer(progress)
        except _Dead as exc:
            self._shared.counts.dead += 1
            log.error("submission.dead", id=self.submission.id, entry=self.submission.entry, reason=str(exc))
            end = _error(exc.answer, str(exc))
        except ApiError as exc:
            self._shared.counts.refused += 1
            self._shared.parts.services.observer.refused(exc.status, exc.code or "")
            end = _error(exc)
        else:
            self._shared.counts.answered += 1
            end = End(200, "result", answer)
        if not await self._shared.results.end(self.submission, end):
            raise _Taken

    async def _answer(self, progress: Progress) -> bytes:
        """The whole response, as HTTP would give it; tokens go out on the way.

        :raises ApiError, _Dead: the end is an error.
        :raises BusError, _Again, _Taken: this attempt does not end it.
        """
        s, parts = self.submission, self._shared.parts
        if s.fault:
            raise _Dead(
                s.fault, bad_field("submission", f"The submission cannot be read: {s.fault}.", "bad_submission")
            )
        if progress.tries > MAX_TRIES:
            raise _Dead(f"no token in {MAX_TRIES} attempts", internal())
        fields = Fields(await decode_object(s.request, parts.config.max_body_bytes, parts.offload))
        endpoint = self._endpoint(fields)
        deadline_ms = fields.integer("deadline_ms", 0, 10**12) if s.deadline_ms is None else s.deadline_ms
        outcome: bytes | Exception = b""
        self._overdue = False
        async with anyio.create_task_group() as tasks:
            if deadline_ms is not None and not self._has_token:
                tasks.start_soon(self._expire, (deadline_ms - progress.age_ms) / 1000, tasks.cancel_scope)
            try:
                outcome = await self._serve(endpoint, fields, progress)
            except _OUTCOMES as exc:  # out of the group as it is, not in a group of exceptions
                outcome = exc
            tasks.cancel_scope.cancel()
        if self._overdue:
            await self._give_up("deadline")
            raise ApiError(504, "The deadline passed before the first token.", code="deadline_exceeded")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _endpoint(self, fields: Fields) -> Endpoint:
        """:raises ApiError: there is none of that name."""
        name = (
            self.submission.endpoint or fields.text("endpoint") or ("chat" if fields.get("messages") else "completions")
        )
        if name not in self._shared.endpoints:
            raise bad_field("endpoint", f"endpoint must be one of {', '.join(self._shared.endpoints)}.")
        return self._shared.endpoints[name]

    async def _expire(self, seconds: float, work: anyio.CancelScope) -> None:
        await self._clock.sleep(max(0.0, seconds))
        if not self._has_token:
            self._overdue = True
            work.cancel()

    async def _give_up(self, reason: str) -> None:
        """Nobody waits for the answer any more: no work upstream, as far as Redis answers."""
        name = RequestId(self.submission.name)
        ids = [r.request_id for r in self._prepared.requests] if self._prepared else [name]
        for request_id in ids:
            await self._shared.parts.services.port.cancel(request_id, reason)

    async def _serve(self, endpoint: Endpoint, fields: Fields, progress: Progress) -> bytes:
        """As `_answer`. Waits while there is no worker or no room."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                if self._prepared is None:
                    seed = int.from_bytes(blake2b(self.submission.name.encode(), digest_size=8).digest(), "little")
                    s = self.submission
                    self._prepared = await endpoint.prepare(fields, s.name, SeededRandomness(seed), s.tenant)
                _refuse_logprobs(self._prepared.params)
                return await self._generate(endpoint, self._prepared, progress)
            except ApiError as exc:
                if exc.retry_after_s is None:
                    raise
                self._is_first = False  # others of its requests may have been admitted
                self._shared.counts.waits += 1
                log.debug("submission.waits", id=self.submission.id, why=exc.code)
            pause = await self._sleep(pause)

    async def _generate(self, endpoint: Endpoint, prepared: Prepared, progress: Progress) -> bytes:
        generation = Generation(
            self._shared.parts.services,
            prepared.requests,
            prepared.params.shown,
            endpoint=endpoint.name,
            stream=True,
            arrived_at=self._arrived_at,
            durable_by=self._admit,
        )
        async with generation:
            texts = [_Text() for _ in range(generation.num_choices)]
            answers = empty_answers(prepared.requests)
            try:
                while deltas := await generation.read():
                    for delta in deltas:
                        answers[delta.choice].add(delta)
                    await self._write(deltas, texts, progress)
            except ApiError as exc:
                failed = generation.failed_by
                if failed is None or generation.lost:
                    raise _Again(failed.error if failed else str(exc)) from None
                raise _Dead(failed.error or failed.reason, exc) from None
            return prepared.whole(answers, generation.usage)

    async def _write(self, deltas: Sequence[Delta], texts: Sequence[_Text], progress: Progress) -> None:
        found = (
            texts[d.choice].item(d, progress.tokens.get(d.choice, 0), progress.chars.get(d.choice, 0)) for d in deltas
        )
        if items := [item for item in found if item is not None]:
            answer = await self._shared.results.write(self.submission, items)
            if answer == "lost":
                raise _Taken
            if answer == "gap":
                raise _Again("the result is not where this attempt left it")
        self._has_token = self._has_token or any(delta.token_ids for delta in deltas)

    async def _admit(self, request: GenerateRequest) -> Admission:
        """Go on with what was admitted in an earlier attempt, or admit.

        :raises _Taken: the submission is another gateway's.
        """
        while True:
            adopted = await self._shared.results.adopt(self.submission, request)
            if adopted == "lost":
                raise _Taken
            if adopted == "adopted":
                return "admitted"
            epoch, outputs = (1, ()) if self._is_first else (self._fresh_epoch(), await self._outputs(request))
            admitted = await self._shared.leases.admit(request, self._max_queued, epoch, outputs)
            if admitted == "unknown":
                raise BusError("redis does not know this gateway yet")  # the keeper greets, the job tries again
            if admitted != "duplicate":
                return admitted

    def _fresh_epoch(self) -> int:
        """Above all epochs that a request had which Redis has forgotten, as workers may remember what they were told:
        one for each millisecond since the submission was written. A record is forgotten a minute after its end at the
        earliest, and no attempt or adoption takes as little as a millisecond."""
        return 2 + int(1000 * (self._clock.now() - self._submitted_at))

    async def _outputs(self, request: GenerateRequest) -> list[Sequence[int]]:
        """The tokens of the request's choices that are out. For one that Redis may have had before and forgotten, as it
        does some time after the end: what goes on is then the same text."""
        assert self._prepared is not None
        first = 0
        for other in self._prepared.requests:
            if other.request_id == request.request_id:
                break
            first += other.num_choices
        if self._written is None:  # once: only this job adds to it meanwhile, and adds what it takes from here
            self._written = await self._shared.results.written(self.submission)
        return [self._written.get(first + choice, ()) for choice in range(request.num_choices)]


def _refuse_logprobs(params: Params) -> None:
    """Text is a function of the token log, by which another gateway may go on; log-probabilities are not in it."""
    changes = params.changes
    if changes.logprobs is not None or changes.prompt_logprobs is not None:
        name = "best_of" if params.best_of > params.n else "logprobs"
        raise bad_field(name, f"{name}: log-probabilities are not supported in submissions.", "unsupported")


def _error(error: ApiError, dead: str = "") -> End:
    return End(error.status, "error", msgspec.json.encode(error.body()), dead)
