"""The thread that runs a worker's steps, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio

from services.engine.types import StepPlan
from services.transfer.landing import Ticket
from shared.offload import Ticket as LaneTicket
from tests.sim.plan import HANG_S

if TYPE_CHECKING:
    from tests.sim.machines import Life


class StepOffload:
    """Runs on the event loop; takes virtual time. A cancelled caller waits for the end, as with a thread. Steps
    are handed in by `submit` alone."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._free_at = 0.0
        self._last: StepTicket | None = None
        self._was_slow = False

    async def run(self, fn: Callable[..., Any], *args: object) -> Any:
        world = self._life.world
        with anyio.CancelScope(shield=True):
            await world.clock.sleep(world.rng.expovariate(500))
        ticket = getattr(fn, "__self__", None)
        if isinstance(ticket, Ticket) and ticket.mapped is not None:  # it copies now
            for piece in ticket.pieces:
                world.judge.byte_lands(self._life.incarnation, piece.dest)
        return fn(*args)

    def submit(self, fn: Callable[..., Any], *args: object) -> StepTicket:
        """A step, behind those that were handed in before."""
        world, life = self._life.world, self._life
        cost = world.rng.expovariate(500)
        if args and isinstance(args[0], StepPlan):
            cost = world.rng.uniform(0.8, 1.2) * (0.004 + 0.0004 * args[0].num_tokens) * life.slowness
            cost *= world.plan.pace
            if life.hung:
                life.hangs.set()
                cost = 3 * HANG_S
        self._free_at = max(self._free_at, world.clock.now()) + cost
        if life.slowness > 1.0:
            life.slow_steps = life.slowness
        if life.slowness > 1.0 or self._was_slow:  # one that was planned during a slow step is late as well
            life.slow_steps_until = self._free_at
        self._was_slow = life.slowness > 1.0
        ticket = StepTicket(world, fn, args, self._free_at, self._last)
        self._last = ticket
        return ticket


class StepTicket(LaneTicket[Any]):
    """What a lane's thread would have done by a moment of virtual time. Done in the order of the lane."""

    def __init__(
        self, world: Any, fn: Callable[..., Any], args: tuple[object, ...], due: float, before: StepTicket | None
    ) -> None:
        self._world, self._fn, self._args, self._due, self._before = world, fn, args, due, before
        self._outcome: tuple[Any, Exception | None] | None = None

    async def wait(self) -> None:
        await self._world.clock.sleep(max(0.0, self._due - self._world.clock.now()))
        self.do()

    @property
    def is_over(self) -> bool:
        return self._outcome is not None

    def do(self) -> None:
        if self._outcome is not None:
            return
        if self._before is not None:
            self._before.do()
            self._before = None
        try:
            self._outcome = self._fn(*self._args), None
        except Exception as exc:
            self._outcome = None, exc

    def result(self) -> Any:
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return value
