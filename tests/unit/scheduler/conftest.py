"""A scheduler over a cell in memory, stepped by hand on a manual clock."""

from dataclasses import dataclass

import pytest

from services.prefix_index.service import IndexService
from services.scheduler.service import Scheduler
from shared.clock import ManualClock
from shared.config import LeaseConfig, PrefixIndexConfig, SchedulerConfig
from shared.ids import Incarnation
from shared.randomness import SeededRandomness
from tests.unit.scheduler.cell import Cell


@dataclass
class Desk:
    """The scheduler's tasks, called one after the other instead of running."""

    cell: Cell
    clock: ManualClock
    scheduler: Scheduler
    index: IndexService

    async def step(self) -> None:
        """Take in what waits on the stream, and dispatch what fits."""
        reader = self.scheduler.intake._reader
        deliveries = await reader.next(0)
        await self.scheduler.intake.take(deliveries)
        reader.ack(deliveries)
        await self.scheduler.dispatcher.pump()
        self.scheduler.ledger.check()

    async def start(self) -> None:
        await self.scheduler._take_over()

    def again(self) -> "Desk":
        """Another scheduler over the same cell: a restart, or a second one that takes over."""
        return desk_of(self.cell, self.clock, f"scheduler-{self.cell.term}").mute()

    def mute(self) -> "Desk":
        """Nobody answers for the index, and nobody waits for it."""
        self.scheduler.hints._silent, self.scheduler.hints._last_asked = True, self.clock.now()
        return self


def desk_of(cell: Cell, clock: ManualClock, name: str = "scheduler-0") -> Desk:
    scheduler = Scheduler(
        cell.bus,
        cell.keys,
        cell,
        cell,
        Incarnation(name),
        clock,
        SeededRandomness(1),
        lambda: cell.last_outage,
        SchedulerConfig(),
        LeaseConfig(),
    )
    index = IndexService(cell.bus, cell.keys, cell, clock, PrefixIndexConfig())
    return Desk(cell, clock, scheduler, index)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def cell(clock: ManualClock) -> Cell:
    return Cell(clock)


@pytest.fixture
def desk(cell: Cell, clock: ManualClock) -> Desk:
    """Without hints."""
    return desk_of(cell, clock).mute()
