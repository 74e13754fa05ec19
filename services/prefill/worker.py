"""Prefill worker. The life of a request here:

waiting     task read, offer open; lives by this worker's heartbeat
computing   the first chunk has run: this worker holds the lease; blocks are announced as they fill
offered     first token sampled and on its way; blocks pinned until the reader has released them
ended       released, or the first token ended the request, or cancelled, or lost
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import structlog

from services.engine.choices import Choices
from services.engine.engine import Engine
from services.engine.specs import choice_of, leader_of, seq_ids, seq_spec, tokens_of
from services.engine.types import Filled, SeqId, SeqOutput, StepOutput
from services.transfer import Offer, TransferSource
from shared.errors import GrammarError
from shared.ids import BlockHash, Incarnation, RequestId
from shared.leases import Fence, Leases
from shared.messages import DecodeTask, PrefillTask, RequestState
from shared.outbox import Ending, Outbox, Parcel
from shared.tombstones import Tombstones
from shared.worker_link import WorkerLink

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Job:
    """One attempt at one request."""

    fence: Fence
    seq_id: SeqId
    state: RequestState
    reader: Incarnation
    offer: Offer
    choices: Choices
    held: bool = False  # the lease is ours
    handed_on: bool = False  # decode has it: the offer lives only as long as its reader gives signs
    offered: bool = False  # first token out, waiting for the release


@dataclass(slots=True)
class PrefillStats:
    requests: int = 0
    handed_off: int = 0
    finished_here: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    active: int = 0
    emit_backlog: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class PrefillWorker:
    """Runs prompts and offers their blocks. Implements `shared.worker_link.Duties`."""

    def __init__(
        self,
        incarnation: Incarnation,
        engine: Engine,
        source: TransferSource,
        leases: Leases,
        lease_s: float,
        max_model_len: int,
        max_attempts: int,
    ) -> None:
        self._incarnation, self._engine, self._source = incarnation, engine, source
        self._leases, self._lease_s, self._max_model_len = leases, lease_s, max_model_len
        self._max_attempts = max_attempts
        self._jobs: dict[SeqId, Job] = {}
        self._by_request: dict[RequestId, SeqId] = {}
        self._tombstones = Tombstones()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._wake = anyio.Event()
        self.outbox = Outbox(leases, lambda request_id, epoch: self.cancel(request_id, epoch, "stale"))
        self.counts = PrefillStats()

    # --- duties ---

    def take(self, task: PrefillTask | DecodeTask, state: RequestState | None) -> None:
        assert isinstance(task, PrefillTask), "a decode task was sent to a prefill worker"
        if state is None or self._tombstones.covers(task.request_id, task.epoch):
            return
        choices = Choices.of(state, self._max_model_len)
        if choices.over:
            return  # resumed after its last token: decode completes it
        if self._job(task.request_id, task.epoch) is not None:
            return  # the same task again
        self._supersede(task)
        fence = Fence(task.request_id, task.epoch, task.attempt)
        offer = self._source.open(task.request_id, task.epoch, task.attempt, task.reader)
        ids = seq_ids(task.request_id, task.epoch, state.request.num_choices)
        job = Job(fence, ids[0], state, task.reader, offer, choices)
        self._jobs[job.seq_id] = job
        self._by_request[task.request_id] = job.seq_id
        self.counts.requests += 1
        self._start(self._settle, job)
        if state.request.sampling.grammar:
            self._start(self._prepare, job)
        else:
            self._add(job)

    def _add(self, job: Job) -> None:
        ids = seq_ids(job.fence.request_id, job.fence.epoch, job.state.request.num_choices)
        self._engine.add(seq_spec(job.state, ids, self._engine.block_size, prefill_only=True))
        self._wake.set()

    async def _prepare(self, job: Job) -> None:
        """Compile the job's grammar beside the steps, then add it."""
        try:
            await self._engine.prepare(job.state.request.sampling)
        except GrammarError as exc:
            if job.seq_id in self._jobs:
                self._fail(job, str(exc))
            return
        if job.seq_id in self._jobs:
            self._add(job)

    def cancel(self, request_id: RequestId, epoch: int, reason: str) -> None:
        seq_id = self._by_request.get(request_id)
        job = self._jobs.get(seq_id) if seq_id else None
        if job is None:
            self._tombstones.add(request_id, epoch)
        elif job.fence.epoch <= epoch:
            self.counts.cancelled += 1
            self._end(job, reason)

    def cancel_choice(self, request_id: RequestId, epoch: int, choice: int) -> None:
        """Nothing: the choices part behind what is computed here."""

    def _supersede(self, task: PrefillTask) -> None:
        seq_id = self._by_request.get(task.request_id)
        if seq_id is not None and self._jobs[seq_id].fence.epoch < task.epoch:
            self.cancel(task.request_id, task.epoch - 1, "superseded")

    def held(self) -> Sequence[Fence]:
        for job in self._jobs.values():
            if not job.handed_on:
                job.offer.keep()
        return [job.fence for job in self._jobs.values() if job.held]

    def lost(self, fence: Fence, handed_on: bool) -> None:
        job = self._job(fence.request_id, fence.epoch)
        if job is not None:
            job.held, job.handed_on = False, handed_on
            if not handed_on:
                self._end(job, "lease lost")

    def progress(self) -> int | None:
        return self._engine.num_steps if self._engine.is_stepping else None

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        return self._engine.cached_hashes()

    def idle(self) -> bool:
        return not self._jobs and not self.outbox.num_waiting

    # --- the loop ---

    async def run(
        self, link: WorkerLink, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Step the engine while it has work, until cancelled. Started = it may be given work."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self.outbox.run)
            task_status.started()
            while True:
                self._wake = anyio.Event()
                output = await self._engine.step()
                if output is None:
                    await link.publish_kv(self._engine.drain_events())  # what no step has reported
                    await self._wake.wait()
                    continue
                self._say(output)
                await link.publish_kv(output.kv_events)

    def _say(self, output: StepOutput) -> None:
        """Announce, emit and account for what a step did."""
        for seq_id in output.started:
            if job := self._jobs.get(seq_id):
                self._start(self._accept, job)
        for filled in output.filled:
            if job := self._jobs.get(filled.seq_id):
                self._announce(job, filled)
        parcel = Parcel()
        for item in output.outputs:
            choice = choice_of(item.seq_id)
            if job := self._jobs.get(item.seq_id if not choice else leader_of(item.seq_id)):
                self._first_token(job, choice, item, parcel)
        for seq_id, error in output.failed:
            if job := self._jobs.get(leader_of(seq_id)):
                self._fail(job, error)
        self.outbox.put(parcel)

    def _start(self, act: Callable[..., Coroutine[Any, Any, object]], *args: object) -> None:
        assert self._tasks is not None, "the worker is not running"
        self._tasks.start_soon(act, *args)

    async def _accept(self, job: Job) -> None:
        answer = await self._leases.accept(job.fence, self._incarnation, "prefill", self._lease_s)
        job.held, job.handed_on = answer == "held", answer == "handed_on"
        if answer == "stale":
            self._end(job, "stale")

    def _announce(self, job: Job, filled: Filled) -> None:
        job.offer.announce(filled.first_block, filled.block_ids, filled.digests, filled.last)
        if filled.last is not None:
            job.offered = True

    def _first_token(self, job: Job, choice: int, item: SeqOutput, parcel: Parcel) -> None:
        request, fence = job.state.request, job.fence
        parcel.add(request.gateway, tokens_of(fence.request_id, fence.epoch, choice, item), fence.attempt)
        if not job.choices.said(choice, item.index + len(item.token_ids), item.finish):
            return
        self.counts.finished_here += 1
        finished = job.choices.finished(fence.request_id, fence.epoch, item.num_cached_tokens)
        parcel.endings.append(Ending(fence, request.gateway, finished, job.reader, self._incarnation))
        self._end(job, "the first token ended it")

    def _fail(self, job: Job, error: str) -> None:
        """The step raised: give the request up at once, so that it goes on elsewhere (or fails for good)."""
        self.counts.failed += 1
        log.error("prefill.failed", request_id=job.fence.request_id, error=error)
        self._end(job, "prefill failed", over=False)
        self._start(self._give_up, job.fence, error)

    async def _give_up(self, fence: Fence, error: str) -> None:
        await self._leases.requeue(
            fence.request_id, fence.epoch, f"prefill failed: {error}", self._max_attempts, lost=self._incarnation
        )

    # --- endings ---

    async def _settle(self, job: Job) -> None:
        """Blocks go back only when no reader can want them any more."""
        outcome = await job.offer.settled()
        if outcome == "released":
            self.counts.handed_off += 1
            log.info("seq.handed_off", request_id=job.fence.request_id, epoch=job.fence.epoch)
        elif outcome == "expired":
            self.counts.expired += 1
        if job.offered:
            self._engine.release(job.seq_id)
        else:
            self._engine.abort(job.seq_id)
        self._drop(job)
        self._wake.set()

    def _end(self, job: Job, reason: str, *, over: bool = True) -> None:
        """`over`: the attempt is, so decode has nothing to do either; else it computes the prompt itself."""
        job.held = False
        job.offer.withdraw(reason, over=over)  # `_settle` does the rest

    def _drop(self, job: Job) -> None:
        self._jobs.pop(job.seq_id, None)
        if self._by_request.get(job.fence.request_id) == job.seq_id:
            del self._by_request[job.fence.request_id]

    def _job(self, request_id: RequestId, epoch: int) -> Job | None:
        seq_id = self._by_request.get(request_id)
        job = self._jobs.get(seq_id) if seq_id else None
        return job if job is not None and job.fence.epoch == epoch else None

    def stats(self) -> PrefillStats:
        self.counts.active, self.counts.emit_backlog = len(self._jobs), self.outbox.num_waiting
        return self.counts
