"""The loop's body: plan on the event loop, run elsewhere, commit on the event loop.

Everything but `step` is synchronous and may be called while a step runs; the planner keeps what the step uses apart.
"""

import anyio
import structlog

from services.engine.grammars import Grammars
from services.engine.planner import Planner
from services.engine.progress import check_result
from services.engine.types import (
    EngineStats,
    Reservation,
    Runner,
    SeqId,
    SeqSpec,
    StepOutput,
    StepPlan,
    StepResult,
)
from shared.clock import Clock
from shared.ids import BlockHash
from shared.messages import FirstToken, Removed, SamplingParams, Stored
from shared.offload import Offload

log = structlog.get_logger(__name__)


class Engine:
    """One KV pool, one runner, one step at a time. Knows no request and no other worker."""

    def __init__(
        self, planner: Planner, runner: Runner, offload: Offload, clock: Clock, grammars: Grammars | None = None
    ) -> None:
        """:param grammars: the runner's; None where it has none."""
        self._planner = planner
        self._runner = runner
        self._offload = offload
        self._clock = clock
        self._grammars = grammars
        self._stepping = False
        self._run_s = 0.0  # in the runner
        self._step_s = 0.0  # in steps altogether
        self._failed_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a seq waits or runs. True does not promise that `step` finds something to do."""
        return self._planner.has_work

    @property
    def is_stepping(self) -> bool:
        return self._stepping

    async def step(self) -> StepOutput | None:
        """Run one step; None if nothing can run now: something must come, land, be released or dropped first.

        A runner that raises ends the seqs of its step (`StepOutput.failed`), not the engine. Cancelling waits for the
        step and is delivered after it, so no plan is left half done.
        """
        assert not self._stepping, "steps do not overlap"
        began = self._clock.now()
        plan = self._planner.plan()
        if plan is None:
            return None
        self._stepping = True
        try:
            with anyio.CancelScope(shield=True):
                return await self._run(plan)
        finally:
            self._stepping = False
            self._step_s += self._clock.now() - began

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
        """See `Planner.reserve`. After None, ask again once `step` has returned, before the next one."""
        return self._planner.reserve(spec)

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
        stats.extra.update(run_s=self._run_s, step_s=self._step_s, failed_steps=float(self._failed_steps))
        return stats

    def check(self) -> None:
        """Assert all invariants of planner and pool: for tests, and when idle."""
        self._planner.check()

    async def _run(self, plan: StepPlan) -> StepOutput:
        began = self._clock.now()
        try:
            result: StepResult = await self._offload.run(self._runner.run, plan)
            check_result(plan, result)
        except Exception as exc:  # whatever a model or kernel may raise: this step's seqs pay, the others go on
            self._failed_steps += 1
            log.exception("engine.step_failed", step=plan.step, num_tokens=plan.num_tokens)
            return self._planner.fail(plan, f"{type(exc).__name__}: {exc}")
        except BaseException:
            self._planner.fail(plan, "interrupted")
            raise
        finally:
            self._run_s += self._clock.now() - began
        return self._planner.commit(plan, result)
