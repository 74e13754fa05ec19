"""Decode worker. The life of a request here:

reserving   task read; waits for blocks for the whole prompt (promised to it at dispatch)
landing     blocks are pulled from the prefill worker while that still computes; the lease is prefill's
running     verified and accepted: this worker holds the lease; one row per step in the batch
ended       finished, cancelled, stale or failed: blocks released, credit returned

A request without a source starts at running: its prompt is computed here, in chunks beside the others' decode
rows. So does one whose blocks could not be fetched: that is counted, and never silent.
"""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import structlog

from services.decode.job import Job, Phase
from services.engine.choices import Choices
from services.engine.engine import Engine
from services.engine.seq import ends_with
from services.engine.specs import choice_of, leader_of, parted_specs, seq_ids, seq_spec, tokens_of
from services.engine.types import Reservation, SeqId, SeqOutput, SeqSpec, StepOutput
from services.transfer import TransferReader
from shared.errors import GrammarError, TransferError, TransferOver
from shared.ids import BlockHash, BlockId, Incarnation, RequestId
from shared.leases import Fence, Leases, RequeueAnswer
from shared.messages import DecodeTask, FirstToken, PrefillTask, RequestState, Tokens
from shared.outbox import Ending, Outbox, Parcel
from shared.tombstones import Tombstones
from shared.worker_link import WorkerLink

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class DecodeStats:
    requests: int = 0
    landed: int = 0
    computed_here: int = 0  # prompts that had no source
    fetch_failed: int = 0  # handed off, but computed here after all
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    choices_stopped: int = 0  # those that the client had all of, ended before the others
    active: int = 0
    reserving: int = 0
    emit_backlog: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class DecodeWorker:
    """Generates tokens. Implements `shared.worker_link.Duties`."""

    def __init__(
        self,
        incarnation: Incarnation,
        engine: Engine,
        reader: TransferReader,
        leases: Leases,
        lease_s: float,
        max_model_len: int,
        max_attempts: int,
    ) -> None:
        self._incarnation, self._engine, self._reader = incarnation, engine, reader
        self._leases, self._lease_s = leases, lease_s
        self._max_model_len, self._max_attempts = max_model_len, max_attempts
        self._jobs: dict[SeqId, Job] = {}
        self._by_request: dict[RequestId, SeqId] = {}
        self._reserving: deque[Job] = deque()
        self._tombstones = Tombstones()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._wake = anyio.Event()
        self.outbox = Outbox(leases, self._stale)
        self.counts = DecodeStats()

    # --- duties ---

    def take(self, task: PrefillTask | DecodeTask, state: RequestState | None) -> None:
        assert isinstance(task, DecodeTask), "a prefill task was sent to a decode worker"
        fence = Fence(task.request_id, task.epoch, task.attempt)
        if state is None:
            self._start(self._refund, task.request_id, task.epoch, None)
            return
        if self._tombstones.covers(task.request_id, task.epoch):
            self._start(self._decline, fence)
            return
        seq_id = seq_ids(task.request_id, task.epoch, 1)[0]
        if seq_id in self._jobs:
            return  # the same task again
        self._supersede(task)
        job = Job(fence, seq_id, task, state, Choices.of(state, self._max_model_len))
        self._jobs[job.seq_id] = job
        self._by_request[task.request_id] = job.seq_id
        self.counts.requests += 1
        if job.choices.over:
            self._finish(job)
        elif task.source is None:
            self.counts.computed_here += 1
            self._start(self._run_here, job)
        else:
            self._reserving.append(job)
            self._wake.set()

    def cancel(self, request_id: RequestId, epoch: int, reason: str) -> None:
        seq_id = self._by_request.get(request_id)
        job = self._jobs.get(seq_id) if seq_id else None
        if job is None:
            self._tombstones.add(request_id, epoch)
        elif job.fence.epoch <= epoch:
            self.counts.cancelled += 1
            self._end(job, refund=True)

    def cancel_choice(self, request_id: RequestId, epoch: int, choice: int) -> None:
        seq_id = self._by_request.get(request_id)
        job = self._jobs.get(seq_id) if seq_id else None
        if job is not None and job.fence.epoch == epoch and choice in job.choices.open:
            job.unwanted.add(choice)
            self._stop_unwanted(job)

    def _stop_unwanted(self, job: Job) -> None:
        """End choices that nobody wants more of, once they are seqs of their own: when each has said something."""
        parted = job.phase is Phase.RUNNING and any(job.choices.num_output)
        stopped = sorted(job.unwanted) if parted else []
        for choice in stopped:
            job.unwanted.discard(choice)
            if choice not in job.choices.open:
                continue
            self.counts.choices_stopped += 1
            self._engine.abort(job.seq_ids[choice])
            if job.choices.said(choice, job.choices.num_output[choice], "stop"):
                self._finish(job)
                return
        if stopped:
            self._wake.set()  # what waits for blocks may have them now

    def _supersede(self, task: DecodeTask) -> None:
        seq_id = self._by_request.get(task.request_id)
        if seq_id is not None and self._jobs[seq_id].fence.epoch < task.epoch:
            self.cancel(task.request_id, task.epoch - 1, "superseded")

    def held(self) -> Sequence[Fence]:
        return [job.fence for job in self._jobs.values() if job.held]

    def lost(self, fence: Fence, handed_on: bool) -> None:
        self.cancel(fence.request_id, fence.epoch, "stale")

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
                if self._wake.is_set():
                    self._wake = anyio.Event()
                self._reserve()
                output = await self._engine.step()
                if output is None:
                    await link.publish_kv(self._engine.drain_events())  # what no step has reported
                    await self._wake.wait()
                    continue
                self._say(output)
                await link.publish_kv(output.kv_events)

    def _reserve(self) -> None:
        """Give blocks to landings, in order of arrival; the first that does not fit waits for the next step."""
        while self._reserving:
            job = self._reserving[0]
            reservation = self._engine.reserve(self._spec(job))
            if reservation is None:
                return
            self._reserving.popleft()
            job.phase = Phase.LANDING
            self._start(self._land, job, reservation)

    def _say(self, output: StepOutput) -> None:
        """Emit and account for what a step did."""
        parcel = Parcel()
        for item in output.outputs:
            choice = choice_of(item.seq_id)
            if job := self._jobs.get(leader_of(item.seq_id) if choice else item.seq_id):
                self._emit(job, choice, item, parcel)
        self.outbox.put(parcel)
        for job in [job for job in self._jobs.values() if job.unwanted]:
            self._stop_unwanted(job)
        for seq_id, error in output.failed:
            if job := self._jobs.get(leader_of(seq_id)):
                self._fail(job, error)

    def _emit(self, job: Job, choice: int, item: SeqOutput, parcel: Parcel) -> None:
        job.num_cached_tokens = job.num_cached_tokens or item.num_cached_tokens
        fence = job.fence
        tokens = tokens_of(fence.request_id, fence.epoch, choice, item, job.num_cached_tokens)
        parcel.add(job.gateway, tokens, fence.attempt)
        if job.choices.said(choice, item.index + len(item.token_ids), item.finish):
            parcel.endings.append(self._ending(job))
            self._end(job, refund=False)

    # --- landing ---

    async def _land(self, job: Job, reservation: Reservation) -> None:
        """Pull the prompt's blocks, take the lease, join the batch. The reservation is this task's alone: it ends here
        in `land` or in `drop`, and `drop` only when no byte can move into its blocks any more."""
        first: FirstToken | None = None
        await self._engine.settle()
        with job.fetching:
            first = await self._fetch(job, reservation)
        if first is None and job.seq_id in self._jobs:
            self._engine.drop(job.seq_id)
            job.phase = Phase.RESERVING
            await self._run_here(job)
        elif first is not None and await self._prepare(job) and await self._accept(job):
            self._join(job, first)
        else:
            self._engine.drop(job.seq_id)
        self._wake.set()

    async def _fetch(self, job: Job, reservation: Reservation) -> FirstToken | None:
        """None: the blocks are not to be had; no byte can move into them any more."""
        task, hits = job.task, reservation.num_hit_blocks
        assert task.source is not None
        if reservation.num_shared_blocks:
            keep = max(0, task.credit_blocks - reservation.num_shared_blocks)
            await self._refund(task.request_id, task.epoch, keep)
        dest: list[BlockId | None] = [None if i < hits else b for i, b in enumerate(reservation.block_ids)]
        try:
            fetched = await self._reader.fetch(task.source, task.request_id, task.epoch, task.attempt, dest)
        except TransferOver:
            self._end(job, refund=True)
            return None
        except TransferError as exc:
            self.counts.fetch_failed += 1
            log.warning("seq.fetch_failed", request_id=task.request_id, kind=type(exc).__name__, error=str(exc))
            return None
        log.info("seq.landed", request_id=task.request_id, blocks=fetched.num_blocks_read, hit_blocks=hits)
        return fetched.first

    def _join(self, job: Job, first: FirstToken) -> None:
        """Say the first token of each choice again (the gateway drops repeats), then run or end."""
        self.counts.landed += 1
        job.num_cached_tokens = first.num_cached_tokens
        parcel = Parcel()
        fence, state, cached = job.fence, job.state, first.num_cached_tokens
        total = len(state.token_ids) + 1
        for choice, token in enumerate((first.token_id, *first.others)):
            told = first.logprobs[choice : choice + 1]
            tokens = Tokens(fence.request_id, fence.epoch, choice, first.index, (token,), cached, told)
            parcel.add(job.gateway, tokens, fence.attempt)
            reason = ends_with(state.request.sampling, token, first.index + 1, total, self._max_model_len)
            job.choices.said(choice, first.index + 1, reason)
        if not job.choices.over:
            job.phase = Phase.RUNNING
            self._engine.land(job.seq_id, first)
        else:
            parcel.endings.append(self._ending(job))
            self._end(job, refund=False)
            self._engine.drop(job.seq_id)
        self.outbox.put(parcel)
        self._stop_unwanted(job)

    async def _run_here(self, job: Job) -> None:
        """Compute the prompt on this worker. Where another was to, it may have it in its queue still, and we no way to
        it but the cell."""
        if await self._prepare(job) and await self._accept(job, in_vain=True):
            job.phase = Phase.RUNNING
            for spec in self._specs_here(job):
                self._engine.add(spec)
            self._wake.set()

    async def _prepare(self, job: Job) -> bool:
        """What its first step needs; False: it cannot be had here, or the job is gone."""
        try:
            await self._engine.prepare(job.state.request.sampling)
        except GrammarError as exc:
            if job.seq_id in self._jobs:
                self._fail(job, str(exc))
        return job.seq_id in self._jobs

    async def _accept(self, job: Job, *, in_vain: bool = False) -> bool:
        if job.seq_id not in self._jobs:
            return False
        answer = await self._leases.accept(
            job.fence, self._incarnation, "decode", self._lease_s, job.prefill, in_vain=in_vain
        )
        if job.seq_id not in self._jobs:
            return False
        job.held = answer == "held"
        if not job.held:
            self._end(job, refund=True)
        return job.held

    def _spec(self, job: Job) -> SeqSpec:
        return seq_spec(job.state, job.seq_ids, self._engine.block_size, credit_blocks=job.task.credit_blocks)

    def _specs_here(self, job: Job) -> list[SeqSpec]:
        """One seq, or where several choices have said something already one for each that goes on."""
        if not job.state.others:
            return [self._spec(job)]
        size, credit = self._engine.block_size, job.task.credit_blocks
        return parted_specs(job.state, job.choices.open, job.seq_ids, size, credit)

    # --- endings ---

    def _finish(self, job: Job) -> None:
        parcel = Parcel()
        parcel.endings.append(self._ending(job))
        self.outbox.put(parcel)
        self._end(job, refund=False)

    def _ending(self, job: Job) -> Ending:
        self.counts.finished += 1
        finished = job.choices.finished(job.fence.request_id, job.fence.epoch, job.num_cached_tokens)
        return Ending(job.fence, job.gateway, finished, self._incarnation, job.prefill)

    def _fail(self, job: Job, error: str) -> None:
        """The step raised: give the request up at once, so that it goes on elsewhere (or fails for good)."""
        self.counts.failed += 1
        log.error("decode.failed", request_id=job.fence.request_id, error=error)
        self._end(job, refund=True)
        self._start(self._give_up, job.fence, f"decode failed: {error}")

    async def _decline(self, fence: Fence) -> None:
        """Its cancel came first. Should Redis not know of that one, as it was of an earlier life of the request that
        Redis has lost, then somebody waits for this: it goes round, and is taken the next time."""
        await self._refund(fence.request_id, fence.epoch, None)
        if await self._give_up(fence, "it was cancelled before") != "stale":
            log.warning("decode.declined", request_id=fence.request_id, epoch=fence.epoch)
            self._tombstones.forget(fence.request_id)

    async def _give_up(self, fence: Fence, reason: str) -> RequeueAnswer:
        return await self._leases.requeue(
            fence.request_id, fence.epoch, reason, self._max_attempts, lost=self._incarnation
        )

    def _end(self, job: Job, refund: bool) -> None:
        """Forget the job; its blocks go back as soon as nothing can touch them. Mutates all tables."""
        self._jobs.pop(job.seq_id, None)
        if self._by_request.get(job.fence.request_id) == job.seq_id:
            del self._by_request[job.fence.request_id]
        job.held = False
        if job in self._reserving:
            self._reserving.remove(job)
        if job.phase is Phase.LANDING:
            job.fetching.cancel()  # `_land` drops the reservation
        else:
            for seq_id in job.seq_ids:
                self._engine.abort(seq_id)
        if refund:
            self._start(self._refund, job.fence.request_id, job.fence.epoch, None)
        self._wake.set()

    def _stale(self, request_id: RequestId, epoch: int) -> None:
        """Redis refused what we said. Had the job ended here, its credit was left to `complete`: give it back too."""
        self.cancel(request_id, epoch, "stale")
        self._start(self._refund, request_id, epoch, None)

    async def _refund(self, request_id: RequestId, epoch: int, keep: int | None) -> None:
        await self._leases.refund(self._incarnation, request_id, epoch, keep)

    def _start(self, act: Callable[..., Coroutine[Any, Any, object]], *args: object) -> None:
        assert self._tasks is not None, "the worker is not running"
        self._tasks.start_soon(act, *args)

    def stats(self) -> DecodeStats:
        self.counts.active, self.counts.reserving = len(self._jobs), len(self._reserving)
        self.counts.emit_backlog = self.outbox.num_waiting
        return self.counts
