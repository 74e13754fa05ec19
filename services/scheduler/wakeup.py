"""Waiting for an event with a limit on the injected clock."""

import anyio

from shared.clock import Clock


class Wakeup:
    """A bell that one task waits for and anybody rings. Rings while nobody waits are kept, as one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = anyio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it rang within `timeout_s`. Takes the ring."""
        rang = await wait_for(self._event, self._clock, timeout_s)
        if rang:
            self._event = anyio.Event()
        return rang


async def wait_for(event: anyio.Event, clock: Clock, timeout_s: float) -> bool:
    """Whether the event is set within `timeout_s`."""
    if event.is_set():
        await anyio.lowlevel.checkpoint()
        return True

    async def limit() -> None:
        await clock.sleep(timeout_s)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limit)
        await event.wait()
        tasks.cancel_scope.cancel()
    return event.is_set()
