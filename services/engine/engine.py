"""The loop's body: plan on the event loop, run elsewhere, commit on the event loop.

Shortly before a step ends, the next one is planned and handed over, so that the runner goes on at once and the tokens
of this step go out while it computes. Everything but `step` is synchronous and may be called while steps run; the
planner keeps what they use apart.
"""

from collections import deque
from collections.abc import Sequence

import anyio
import msgspec
import structlog

from services.engine.grammars import Grammars
from services.engine.last_tokens import StepLost
from services.engine.planner import Planner
from services.engine.progress import check_result
from services.engine.types import (
    EngineStats,
    Move,
    Reservation,
    Runner,
    SeqId,
    SeqSpec,
    StepOutput,
    StepPlan,
    StepResult,
)
from shared.clock import Clock
from shared.cost import CostModel, StepShape
from shared.ids import BlockHash
from shared.messages import FirstToken, Removed, SamplingParams, Stored
from shared.offload import Lane, Ticket

log = structlog.get_logger(__name__)
AHEAD_S = 0.004
"""The next step is planned so long before this one should end: late, so that what arrives meanwhile is in it."""
AHEAD_SHARE = 0.2
"""Or so much of the step's time before its end, if that is more: for what could not be foretold."""
LEAST_WAIT_S = 0.003
"""A shorter wait than this is not worth a turn of the event loop for each token: the next step is planned at once."""


class _Timed(msgspec.Struct, frozen=True):
    """What the runner answered, and how long copies and step took."""

    result: StepResult
    move_s: float
    run_s: float


class _Flight(msgspec.Struct, frozen=True):
    """A plan that was handed to the runner, which may still be busy with the one before."""

    plan: StepPlan
    shape: StepShape
    predicted_s: float | None
    ticket: Ticket[_Timed]


def shape_of(plan: StepPlan) -> StepShape:
    """What the plan costs, in numbers."""
    num_tokens = num_seqs = kv_tokens = 0
    token_context = 0.0
    for item in plan.items:
        if (num_rows := len(item.token_ids)) == 1:
            num_seqs += 1
            kv_tokens += item.start
        else:
            num_tokens += num_rows
            token_context += num_rows * (item.start + num_rows / 2)
    return StepShape(num_tokens, token_context, num_seqs, kv_tokens)


class Engine:
    """One KV pool, one runner, steps one after the other. Knows no request and no other worker."""

    def __init__(
        self,
        planner: Planner,
        runner: Runner,
        lane: Lane,
        clock: Clock,
        costs: CostModel | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """:param costs: as calibrated; refined by each step. :param grammars: the runner's; None where it has none."""
        self._planner = planner
        self._runner = runner
        self._lane = lane
        self._clock = clock
        self._grammars = grammars
        self._stepping = False
        self._flights: deque[_Flight] = deque()
        self._began = clock.now()  # when the eldest flight began, as far as is known here
        self._costs = costs or CostModel()
        self._flushes: list[Ticket[float]] = []  # copies to host memory that no step carries, under way
        self._steps_ahead = 0
        self._run_s = 0.0  # in the runner
        self._step_s = 0.0  # in steps altogether
        self._failed_steps = 0
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a seq waits or runs, or a step does. True does not promise that `step` finds something to do."""
        return self._planner.has_work or bool(self._flights)

    @property
    def is_stepping(self) -> bool:
        """Whether the runner has something to do."""
        return bool(self._flights)

    @property
    def num_steps(self) -> int:
        """Steps that are over."""
        return self._num_steps

    async def step(self) -> StepOutput | None:
        """Wait for one step's end, having begun it if need be; None if nothing can run now: something must come,
        land, be released or dropped first.

        A runner that raises ends the seqs of its step (`StepOutput.failed`), not the engine. Cancelling waits for the
        step and is delivered after it, so no plan is left half done; one that was made ahead stays in flight, for
        the next call.
        """
        assert not self._stepping, "one caller at a time"
        if not self._flights and not self._launch():
            return None
        self._stepping = True
        try:
            with anyio.CancelScope(shield=True):
                return await self._land()
        finally:
            self._stepping = False

    @property
    def block_size(self) -> int:
        return self._planner.block_size

    async def prepare(self, sampling: SamplingParams) -> None:
        """What a seq of these parameters needs, before it is added or lands: its grammar compiled, off the event loop.

        :raises GrammarError: it cannot be compiled here.
        """
        if sampling.grammar and self._grammars is not None:
            await self._grammars.prepare(sampling.grammar)

    def add(self, spec: SeqSpec) -> None:
        """See `Planner.add`."""
        self._planner.add(spec)

    def reserve(self, spec: SeqSpec) -> Reservation | None:
        """See `Planner.reserve`. After None, ask again once `step` has returned, before the next one. Nothing may write
        into the blocks before `settle` has returned."""
        return self._planner.reserve(spec)

    async def settle(self) -> None:
        """Until what reservations took from others has been copied to host memory, if it was to be."""
        if moves := self._planner.take_moves():
            self._flushes.append(self._lane.submit(self._move, moves, ()))
        with anyio.CancelScope(shield=True):
            for ticket in (*self._flushes, *(flight.ticket for flight in self._flights if flight.plan.parks)):
                await ticket.wait()
        self._flushes = [ticket for ticket in self._flushes if not ticket.is_over]

    def land(self, seq_id: SeqId, first: FirstToken) -> bool:
        """See `Planner.land`."""
        return self._planner.land(seq_id, first)

    def drop(self, seq_id: SeqId) -> None:
        """See `Planner.drop`."""
        self._planner.drop(seq_id)

    def abort(self, seq_id: SeqId) -> None:
        """See `Planner.abort`."""
        self._planner.abort(seq_id)

    def release(self, seq_id: SeqId) -> None:
        """See `Planner.release`."""
        self._planner.release(seq_id)

    def drain_events(self) -> tuple[Stored | Removed, ...]:
        """Cache changes that no step has reported yet: for an idle engine."""
        return self._planner.drain_events()

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        """Hashes of all blocks that a prefix can hit now, drained events or not."""
        return self._planner.cached_hashes()

    def stats(self) -> EngineStats:
        """A snapshot. `extra`: seconds in the runner and in steps, failed steps, recomputed tokens, promised blocks."""
        stats = self._planner.stats()
        stats.extra.update(
            run_s=self._run_s,
            step_s=self._step_s,
            steps_ahead=float(self._steps_ahead),
            failed_steps=float(self._failed_steps),
            bytes_parked=stats.extra["blocks_parked"] * self._runner.block_bytes,
            **{f"cost_{name}": value for name, value in self._costs.stats().items()},
        )
        return stats

    def check(self) -> None:
        """Assert all invariants of planner and pool: for tests, and when idle."""
        self._planner.check()

    def _launch(self) -> bool:
        """Plan a step and hand it to the runner; False if nothing can be planned now."""
        plan = self._planner.plan()
        if plan is None:
            return False
        if not self._flights:
            self._began = self._clock.now()
        shape = shape_of(plan)
        self._flights.append(
            _Flight(plan, shape, self._costs.step_s(shape), self._lane.submit(self._timed, plan)),
        )
        return True

    def _timed(self, plan: StepPlan) -> _Timed:
        """In the runner's thread."""
        move_s = self._move(plan.parks, plan.restores) if plan.parks or plan.restores else 0.0
        began = self._clock.now()
        result = self._runner.run(plan)
        return _Timed(result, move_s, self._clock.now() - began)

    def _move(self, parks: Sequence[Move], restores: Sequence[Move]) -> float:
        """In the runner's thread; the seconds that it took."""
        began = self._clock.now()
        self._runner.move(parks, restores)
        return self._clock.now() - began

    async def _land(self) -> StepOutput:
        """The eldest flight, to its end; the next one is planned before."""
        flight = self._flights[0]
        if len(self._flights) == 1 and not await flight.ticket.wait_at_most(self._patience(flight)):
            self._steps_ahead += self._launch()
        await flight.ticket.wait()
        self._flights.popleft()
        began, self._began = self._began, self._clock.now()
        self._step_s += self._began - began
        self._num_steps += 1
        output = self._settle(flight)
        if not self._flights and not self._planner.wants_quiet:
            self._launch()
        return output

    def _patience(self, flight: _Flight) -> float:
        """Seconds from now until the next step should be planned."""
        expected_s = flight.predicted_s or 0.0
        left_s = expected_s - (self._clock.now() - self._began)
        wait_s = left_s - max(AHEAD_S, AHEAD_SHARE * expected_s)
        return wait_s if wait_s >= LEAST_WAIT_S else 0.0

    def _settle(self, flight: _Flight) -> StepOutput:
        plan = flight.plan
        try:
            timed = flight.ticket.result()
            check_result(plan, timed.result)
        except StepLost:
            return self._planner.skip(plan)
        except Exception as exc:  # whatever a model or kernel may raise: this step's seqs pay, the others go on
            self._failed_steps += 1
            log.exception("engine.step_failed", step=plan.step, num_tokens=plan.num_tokens)
            return self._planner.fail(plan, f"{type(exc).__name__}: {exc}")
        self._note(flight, timed)
        return self._planner.commit(plan, timed.result)

    def _note(self, flight: _Flight, timed: _Timed) -> None:
        """Each prediction with its outcome."""
        self._run_s += timed.run_s
        self._costs.observe_step(flight.shape, timed.run_s)
        if moved := len(flight.plan.parks) + len(flight.plan.restores):
            self._costs.transfer.observe(timed.move_s, moved * self._runner.block_bytes)
        log.debug(
            "engine.step", step=flight.plan.step, predicted_s=flight.predicted_s, actual_s=timed.run_s, moved=moved
        )
