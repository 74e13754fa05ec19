"""Work that must not run on the event loop: engine steps, large copies, digests."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


class Offload(Protocol):
    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """Run `fn(*args)` elsewhere and await its result. Never abandoned: a cancelled caller waits
        until `fn` has returned, so that nothing it writes to is reused under it."""
        ...


class ThreadOffload:
    """A worker thread, at most `lanes` calls at a time."""

    def __init__(self, lanes: int = 1) -> None:
        self._limiter = anyio.CapacityLimiter(lanes)

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        return await anyio.to_thread.run_sync(fn, *args, abandon_on_cancel=False, limiter=self._limiter)


class InlineOffload:
    """Runs at once, in the caller: for tests and the simulation."""

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        await anyio.lowlevel.checkpoint()
        return fn(*args)
