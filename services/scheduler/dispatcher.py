"""From waiting to dispatched. The head of the queue goes first or nobody does, so that a large request is not starved
by small ones; what does not fit now is tried again when credit comes back, a worker joins, or a heartbeat passes."""

from collections.abc import Sequence

import anyio
import structlog

from services.scheduler.hints import Hits, PrefixHints
from services.scheduler.ledger import Ledger
from services.scheduler.placement import Placement, Unplaceable, place
from services.scheduler.ports import Deposed, Requests, Workers
from services.scheduler.waiting import Waiting, WaitingQueue
from services.scheduler.wakeup import Wakeup
from shared.capability import mint
from shared.clock import Clock
from shared.config import SchedulerConfig
from shared.errors import BusError
from shared.ids import AttemptId
from shared.leases import Dispatch, DispatchAnswer
from shared.messages import DecodeTask, PrefillTask, SourceRef
from shared.randomness import Randomness

log = structlog.get_logger(__name__)

MAX_WINDOW = 32
"""Requests whose prefixes are asked for at once. The window starts at one and doubles with each success, so that a full
system does not ask for many to place one."""


class Dispatcher:
    """Owns the step from the queue to the workers. `refresh_wanted` is set by whoever learns that the ledger is old."""

    def __init__(
        self,
        requests: Requests,
        workers: Workers,
        ledger: Ledger,
        waiting: WaitingQueue,
        hints: PrefixHints,
        wakeup: Wakeup,
        clock: Clock,
        randomness: Randomness,
        config: SchedulerConfig,
    ) -> None:
        self._requests, self._workers = requests, workers
        self._ledger, self._waiting, self._hints = ledger, waiting, hints
        self._wakeup, self._clock, self._randomness, self._config = wakeup, clock, randomness, config
        self._key = b""
        self._term = 0
        self._window = 1
        self.refresh_wanted = True
        self.last_pump = clock.now()
        self.num_dispatched = 0
        self.num_handoffs = 0
        self.num_failed = 0

    async def start(self, term: int) -> None:
        """Learn the secret and the workers.

        :raises BusError: Redis is lost.
        """
        self._term, self._key = term, await self._requests.deployment_key()
        await self._refresh()

    async def run(self, tick_s: float) -> None:
        """Dispatch for ever.

        :param tick_s: longest time between two looks at the workers while somebody waits.
        :raises Deposed: another scheduler leads.
        """
        while True:
            if not await self._wakeup.wait(tick_s):
                self.refresh_wanted = True
            try:
                await self.pump()
                self.last_pump = self._clock.now()
            except BusError as exc:
                log.warning("dispatch.paused", error=str(exc))
                self.refresh_wanted = True
                await self._clock.sleep(tick_s)

    async def pump(self) -> None:
        """Dispatch until nobody waits or the head does not fit."""
        self._window = 1
        while True:
            if self.refresh_wanted:
                await self._refresh()
            heads = self._waiting.heads(self._window)
            if not heads or self._place(heads[0], {}) is None:
                return
            hits = await self._ask(heads)
            if not await self._dispatch_all(heads, hits):
                return
            self._window = min(2 * self._window, MAX_WINDOW)

    async def _refresh(self) -> None:
        self.refresh_wanted = False
        self._ledger.refresh(await self._workers.workers())

    def _place(self, waiting: Waiting, hits: Hits) -> Placement | Unplaceable | None:
        return place(waiting.demand, self._ledger.candidates(), hits, self._config)

    async def _ask(self, heads: Sequence[Waiting]) -> list[Hits]:
        """Hits of each, where they could change a decision: a short prompt stays on decode in any case, and a lone
        worker gets everything."""
        if self._ledger.num_workers < 2:
            return [{} for _ in heads]
        shortest = self._config.min_handoff_tokens
        prompts = [w.block_hashes if w.demand.num_prompt_tokens >= shortest else () for w in heads]
        return await self._hints.ask(prompts, self._ledger.fingerprints())

    async def _dispatch_all(self, heads: Sequence[Waiting], hits: Sequence[Hits]) -> bool:
        """Serve the heads in order. False: stopped at one that does not fit. Whom Redis refuses is placed once more
        after a fresh look at the workers, then patience is due."""
        placed, all_fit = await self._place_all(heads, hits)
        refused = await self._send(placed)
        if not refused:
            return all_fit
        await self._refresh()
        known = {waiting.request_id: h for waiting, h in zip(heads, hits, strict=True)}
        placed, all_fit = await self._place_all(refused, [known[waiting.request_id] for waiting in refused])
        self.refresh_wanted = bool(await self._send(placed))
        return all_fit and not self.refresh_wanted

    async def _place_all(
        self, heads: Sequence[Waiting], hits: Sequence[Hits]
    ) -> tuple[list[tuple[Waiting, Placement]], bool]:
        """Place in order, each one booked before the next is placed; whether all of them fit. Fails those that never
        will."""
        out: list[tuple[Waiting, Placement]] = []
        for waiting, known in zip(heads, hits, strict=True):
            if self._waiting.epoch_of(waiting.request_id) != waiting.epoch:
                continue  # ended meanwhile
            placed = self._place(waiting, known)
            if placed is None:
                return out, False
            if isinstance(placed, Unplaceable):
                await self._fail(waiting, placed.reason)
                continue
            self._ledger.take(waiting.request_id, waiting.epoch, placed)
            out.append((waiting, placed))
        return out, True

    async def _send(self, batch: Sequence[tuple[Waiting, Placement]]) -> list[Waiting]:
        """Dispatch all at once, so that Redis syncs its log once for many; who was refused for want of a worker or its
        credit.

        :raises BusError: some got no answer; they stay queued.
        :raises Deposed: another scheduler leads.
        """
        answers: list[DispatchAnswer | BusError] = [BusError("not sent")] * len(batch)

        async def one(position: int) -> None:
            try:
                answers[position] = await self._requests.dispatch(self._dispatch_of(*batch[position]))
            except BusError as exc:
                answers[position] = exc

        async with anyio.create_task_group() as tasks:
            for position in range(len(batch)):
                tasks.start_soon(one, position)
        pairs = list(zip(batch, answers, strict=True))
        refused = [waiting for (waiting, placed), answer in pairs if not self._settle(waiting, placed, answer)]
        for answer in answers:
            if isinstance(answer, BusError):
                raise answer
            if answer == "deposed":
                raise Deposed(f"another scheduler leads since term {self._term}")
        return refused

    def _settle(self, waiting: Waiting, placed: Placement, answer: DispatchAnswer | BusError) -> bool:
        """Book Redis' answer. False: the request still waits and may be placed again at once. Without an answer, both
        queue and ledger keep it, as either may be right."""
        if answer == "dispatched":
            self._note(waiting, placed)
            return True
        if isinstance(answer, BusError):
            return True
        self._ledger.forget(waiting.request_id, before_epoch=waiting.epoch + 1)
        self.refresh_wanted = True
        if answer == "stale":
            self._drop(waiting)
        if answer not in ("no_credit", "worker_gone"):
            return True
        log.info("dispatch.refused", request_id=waiting.request_id, why=answer, decode=placed.decode)
        return False

    def _note(self, waiting: Waiting, placed: Placement) -> None:
        self._drop(waiting)
        self._ledger.confirm(waiting.request_id, waiting.epoch)
        self.num_dispatched += 1
        self.num_handoffs += placed.prefill is not None
        log.debug(
            "request.dispatched",
            request_id=waiting.request_id,
            epoch=waiting.epoch,
            decode=placed.decode,
            prefill=placed.prefill,
            prompt_tokens=waiting.demand.num_prompt_tokens,
            uncached_tokens=placed.uncached_tokens,
        )

    async def _fail(self, waiting: Waiting, reason: str) -> None:
        log.warning("request.unplaceable", request_id=waiting.request_id, reason=reason)
        await self._requests.fail(waiting.request_id, waiting.epoch, reason)
        self._drop(waiting)
        self.num_failed += 1

    def _drop(self, waiting: Waiting) -> None:
        """Take it off the queue, unless a later epoch of it has come in meanwhile."""
        if self._waiting.epoch_of(waiting.request_id) == waiting.epoch:
            self._waiting.remove(waiting.request_id)

    def _dispatch_of(self, waiting: Waiting, placed: Placement) -> Dispatch:
        """The tasks of both workers, and what lets decode read from prefill."""
        request_id, epoch, num_tokens = waiting.request_id, waiting.epoch, waiting.demand.num_prompt_tokens
        attempt = AttemptId(self._randomness.token())
        source, prefill_task = None, None
        if placed.prefill is not None:
            at = self._ledger.registration(placed.prefill)
            capability = mint(self._key, request_id, epoch, attempt, placed.prefill, placed.decode)
            source = SourceRef(
                worker_id=at.worker_id, incarnation=at.incarnation, endpoints=at.endpoints, capability=capability
            )
            prefill_task = PrefillTask(
                request_id=request_id,
                epoch=epoch,
                attempt=attempt,
                term=self._term,
                num_prompt_tokens=num_tokens,
                reader=placed.decode,
            )
        decode_task = DecodeTask(
            request_id=request_id,
            epoch=epoch,
            attempt=attempt,
            term=self._term,
            num_prompt_tokens=num_tokens,
            credit_blocks=placed.credit_blocks,
            source=source,
        )
        return Dispatch(
            request_id=request_id,
            epoch=epoch,
            attempt=attempt,
            term=self._term,
            decode=placed.decode,
            credit_blocks=placed.credit_blocks,
            decode_task=decode_task,
            prefill=placed.prefill,
            prefill_task=prefill_task,
        )
