"""Runs plans: one, many, or one made as short as it can be."""

import asyncio
import gc
import math
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from tests.sim.loop import IN_CALLBACK, START_S, SimTask, VirtualLoop, in_order
from tests.sim.plan import Plan
from tests.sim.world import World

LIMIT_S = 30.0
"""Virtual seconds after the last fault within which everybody must be answered and all be quiet."""


@dataclass(frozen=True)
class Report:
    plan: Plan
    violations: tuple[str, ...]
    outcomes: dict[str, int]
    virtual_s: float
    num_turns: int
    num_commands: int
    faults: dict[str, int]  # that struck, by kind and the role of whom they struck
    log: tuple[str, ...]
    quiet_s: float = math.inf  # after the last end, until all blocks, credit and leases were back
    cancelled_in: dict[str, int] = field(default_factory=dict)  # states of requests when they were cancelled

    def short(self) -> "Report":
        """Without its log and clients: for another process."""
        return replace(self, log=(), plan=replace(self.plan, asks=()))


LOG_LEVEL = 40
"""What the services log from this level on stands in a report's log: errors; 30 = warnings too, which costs time."""


@contextmanager
def logs_to(log: list[str], loop: VirtualLoop) -> Iterator[None]:
    """The services' logs go into a list."""

    def keep(_logger: object, _name: str, event: MutableMapping[str, Any]) -> Any:
        who = loop.current_name()
        log.append(f"{loop.time() - START_S:8.3f}s {who}: {' '.join(f'{k}={v}' for k, v in event.items())}"[:300])
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[keep],
        wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVEL),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def run(plan: Plan, overrides: dict[str, str] | None = None) -> Report:
    """One world from its start to its end."""
    loop = VirtualLoop(plan.seed)
    loop.set_exception_handler(lambda _loop, _context: None)  # tasks of the dead
    gc.freeze()  # what is there already is no garbage of this run
    gc.disable()  # by the number of objects, so at other moments in every run
    log: list[str] = []
    with logs_to(log, loop), in_order():
        try:
            world = loop.run_until_complete(_main(loop, plan, overrides, log))
        finally:
            _end(loop)
    outcomes: dict[str, int] = {}
    for call in world.calls:
        name = call.outcome if call.outcome != "error" else f"error {call.error}"
        outcomes[name] = outcomes.get(name, 0) + 1
    return Report(
        plan,
        tuple(world.violations),
        outcomes,
        world.time(),
        loop.turns,
        world.redis.num_commands,
        dict(world.sufferings.struck),
        tuple(world.log),
        world.quiet_s,
        dict(world.judge.book.cancelled_in),
    )


async def _main(loop: VirtualLoop, plan: Plan, overrides: dict[str, str] | None, log: list[str]) -> World:
    world = World(loop, plan, overrides, log)

    def heed(_loop: object, context: dict[str, Any]) -> None:
        if context["message"] == IN_CALLBACK:
            world.violate(f"{loop.current_name()}: {context['exception']!r}", context["exception"])

    loop.set_exception_handler(heed)
    await world.run(LIMIT_S)
    return world


def _end(loop: VirtualLoop) -> None:
    """Let the dead finish dying, so that no coroutine is torn down by the garbage collector."""
    loop.run_until_complete(_last_breath(loop))
    loop.close()
    gc.enable()
    gc.collect()


async def _last_breath(loop: VirtualLoop) -> None:
    me = asyncio.current_task()
    for _ in range(200):
        others = [task for task in asyncio.all_tasks(loop) if isinstance(task, SimTask) and task is not me]
        if not others:
            return
        await asyncio.sleep(0.5)
        for task in sorted(others, key=lambda task: task.number):
            task.cancel()
