"""A worker's ties to the cell, the same for both roles: registration, heartbeats, tasks and control, lease
renewal by progress, KV events, drain."""

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import anyio.abc
import msgspec
import structlog

from shared.bus import Bus
from shared.clock import Clock
from shared.config import LeaseConfig
from shared.errors import BatonError, BusFull
from shared.ids import BlockHash, Incarnation, RequestId
from shared.keys import Keys
from shared.lazy_reader import LazyReader
from shared.leases import Fence, Leases
from shared.messages import (
    Cancel,
    Cleared,
    ControlMsg,
    DecodeTask,
    KvEvents,
    PrefillTask,
    Registration,
    Removed,
    RequestState,
    ResendKv,
    Stored,
)
from shared.roster import Roster

log = structlog.get_logger(__name__)
DRAIN_LOOK_S = 0.05
DRAIN_LOOKS = 4
STUCK_LOOKS = 16
"""A worker whose step has not moved for so many looks (a quarter of a lease period each) ends its life: what was sent
to it and is not accepted yet lives by its heartbeat, and must go elsewhere."""
RETIRE_S = 2.0
"""A worker that leaves tries for so long to say so; the reaper finds out otherwise."""
KV_MAX_ENTRIES = 20_000
"""In the stream to the prefix index, of all workers; some megabytes. So many are there only if it is gone."""
KV_SIGN_EVERY = 8
"""Heartbeats between two empty KV messages, whose number shows the index if it missed the last events."""


class Buried(BatonError):
    """The cell has given this incarnation up (heartbeats came too late): the process must start a new life."""


class Stuck(BatonError):
    """The engine's step does not end."""


class Duties(Protocol):
    """What a worker does with what it is told."""

    def take(self, task: PrefillTask | DecodeTask, state: RequestState | None) -> None:
        """New work; `state` is None if the request has ended or moved on meanwhile."""
        ...

    def cancel(self, request_id: RequestId, epoch: int, reason: str) -> None:
        """Drop the request's work of that epoch or older. Idempotent."""
        ...

    def cancel_choice(self, request_id: RequestId, epoch: int, choice: int) -> None:
        """The client has all of one choice of that epoch: a hint that its work is in vain. Idempotent."""
        ...

    def held(self) -> Sequence[Fence]:
        """Leases that this worker holds."""
        ...

    def lost(self, fence: Fence, handed_on: bool) -> None:
        """A lease is no longer this worker's."""
        ...

    def progress(self) -> int | None:
        """The number of the step under way; None while none is. The same one twice: the engine is stuck."""
        ...

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        """All blocks in the prefix cache, for an index that missed events."""
        ...


class WorkerLink:
    """Loops of one worker. Start them in the service's task group, `beat` last: alive implies ready."""

    def __init__(
        self,
        registration: Registration,
        duties: Duties,
        bus: Bus,
        keys: Keys,
        leases: Leases,
        roster: Roster,
        clock: Clock,
        config: LeaseConfig,
        secret: bytes | None = None,
    ) -> None:
        """:param secret: the deployment's, as the worker goes by it."""
        self._registration, self._duties, self._secret = registration, duties, secret
        self._bus, self._keys, self._leases, self._roster = bus, keys, leases, roster
        self._clock, self._config = clock, config
        self._incarnation: Incarnation = registration.incarnation
        self._leaving = False
        self._seen: int | None = None  # progress at the last look
        self._looks = 0  # at which it was the same
        self._kv_seq = 0
        self._kv_muted = False
        self._kv_order = anyio.Lock()  # messages leave in the order of their numbers

    async def beat(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Register, then say `alive` until cancelled. Started = registered.

        :raises Buried: the cell has declared this incarnation dead, or is another one than at its start.
        """
        await self._roster.register(self._registration)
        if self._secret is not None and await self._leases.deployment_key() != self._secret:
            raise Buried("Redis lost everything while this worker started")  # no capability would fit
        log.info("worker.registered", role=self._registration.role, blocks=self._registration.num_blocks)
        task_status.started()
        beats = 0
        while True:
            await self._clock.sleep(self._config.heartbeat_s)
            if not await self._roster.heartbeat(self._incarnation) and not self._leaving:
                raise Buried(f"{self._incarnation} was declared dead")
            beats += 1
            if beats % KV_SIGN_EVERY == 0:
                await self._sign()

    async def read(self) -> None:
        """Take control messages and tasks, control first, until cancelled."""
        channels = self._keys.control(self._incarnation), self._keys.work(self._incarnation)
        reader = LazyReader(self._bus.reader(*channels), self._clock)
        while True:
            deliveries = await reader.next()
            for delivery in deliveries:
                for message in delivery.messages:
                    await self._obey(message)
            reader.ack(deliveries)  # late: these streams are this life's alone, nobody finds the entries again

    async def _obey(self, message: ControlMsg | PrefillTask | DecodeTask) -> None:
        match message:
            case Cancel() if message.choice >= 0:
                self._duties.cancel_choice(message.request_id, message.epoch, message.choice)
            case Cancel():
                self._duties.cancel(message.request_id, message.epoch, message.reason)
            case ResendKv():
                await self._resend_kv()
            case PrefillTask() | DecodeTask():
                self._duties.take(message, await self._state_of(message))

    async def _state_of(self, task: PrefillTask | DecodeTask) -> RequestState | None:
        """The request as it was at dispatch: by now the other worker of this attempt may have sent a token more."""
        state = await self._leases.load(task.request_id)
        if state is None or state.epoch != task.epoch:
            return None
        num_sent = task.num_prompt_tokens - len(state.request.token_ids)
        return msgspec.structs.replace(state, output=state.output[:num_sent], others=state.others if num_sent else ())

    async def renew(self) -> None:
        """Renew leases while the engine makes progress, until cancelled.

        :raises Stuck: it has made none for far too long.
        """
        while True:
            await self._clock.sleep(self._config.lease_s / 4)
            if self._is_stuck(self._duties.progress()):
                continue
            fences = list(self._duties.held())
            for start in range(0, len(fences), 64):
                some = fences[start : start + 64]
                answers = await self._leases.renew(self._incarnation, some, self._config.lease_s)
                for fence, answer in zip(some, answers, strict=True):
                    if answer != "held":
                        self._duties.lost(fence, answer == "handed_on")

    def _is_stuck(self, progress: int | None) -> bool:
        """Whether there was no progress since the last look.

        :raises Stuck: nor for many looks before that.
        """
        if progress is None or progress != self._seen:
            self._seen, self._looks = progress, 0
            return False
        self._looks += 1
        log.warning("worker.stalled", steps=progress, looks=self._looks)
        if self._looks >= STUCK_LOOKS:
            raise Stuck(f"step {progress} does not end")
        return True

    async def publish_kv(self, events: Sequence[Stored | Removed | Cleared]) -> None:
        """Tell the prefix index; messages are numbered without gaps."""
        if events:
            async with self._kv_order:
                await self._publish(events)

    async def _sign(self) -> None:
        """An empty message: its number tells whether the last ones arrived. Nothing more is said to an index that
        does not listen: the events would fill Redis, and once it is back it asks for all that is cached."""
        async with self._kv_order:
            muted = await self._bus.length(self._keys.kv()) > KV_MAX_ENTRIES
            if muted != self._kv_muted:
                log.warning("worker.kv_events_muted" if muted else "worker.kv_events_unmuted")
            self._kv_muted = muted
            await self._publish(())

    async def _resend_kv(self) -> None:
        """The snapshot is taken inside the lock: whatever is published later is newer or says the same again."""
        async with self._kv_order:
            await self._publish((Cleared(), Stored(hashes=self._duties.cached_hashes())))

    async def _publish(self, events: Sequence[Stored | Removed | Cleared]) -> None:
        self._kv_seq += 1
        message = KvEvents(
            incarnation=self._incarnation,
            fingerprint=self._registration.fingerprint,
            seq=self._kv_seq,
            events=tuple(events),
        )
        if self._kv_muted:
            return
        try:
            await self._bus.publish(self._keys.kv(), message)
        except BusFull:  # the gap in the numbers will show the index that it missed something
            log.debug("worker.kv_events_dropped", why="redis is full")

    async def drain(self, idle: Callable[[], bool], limit_s: float) -> bool:
        """Take nothing new, go on until `idle()` or `limit_s` is over, then leave for good. True: nothing was left.
        Idle at several looks, as a task that was written just before may not be read yet."""
        with anyio.move_on_after(RETIRE_S):
            await self._roster.retire(self._incarnation, "draining")
        deadline = self._clock.now() + limit_s
        looks = 0
        while looks < DRAIN_LOOKS and self._clock.now() < deadline:
            await self._clock.sleep(DRAIN_LOOK_S)
            looks = looks + 1 if idle() else 0
        left = not idle()
        self._leaving = True
        with anyio.move_on_after(RETIRE_S):
            await self._roster.retire(self._incarnation, "dead")
        log.info("worker.drained", left_work=left)
        return not left
