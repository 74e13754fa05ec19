"""Work that must not run on the event loop: engine steps, large copies, digests."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Offload(Protocol):
    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """Run `fn(*args)` elsewhere and await its result. Never abandoned: a cancelled caller waits
        until `fn` has returned, so that nothing it writes to is reused under it."""
        ...


class Ticket(Protocol[T_co]):
    """A call handed to a lane."""

    async def wait(self) -> None:
        """Until the call is over, well or not. May be cancelled and repeated; the call goes on."""
        ...

    @property
    def is_over(self) -> bool: ...

    def result(self) -> T_co:
        """Once it is over: what it returned or raised."""
        ...


class Lane(Offload, Protocol):
    """Runs calls one after the other, in the order of `submit`; each begins as soon as the one before is over."""

    def submit(self, fn: Callable[..., T], *args: object) -> Ticket[T]:
        """Never blocks. Every ticket must be waited for."""
        ...


class ThreadOffload:
    """A worker thread, at most `lanes` calls at a time."""

    def __init__(self, lanes: int = 1) -> None:
        self._limiter = anyio.CapacityLimiter(lanes)

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        return await anyio.to_thread.run_sync(fn, *args, abandon_on_cancel=False, limiter=self._limiter)


class _ThreadTicket:
    def __init__(self, future: "Future[Any]") -> None:
        self._future, self._over = future, anyio.Event()
        self._loop = asyncio.get_running_loop()
        future.add_done_callback(self._tell)

    def _tell(self, _: "Future[Any]") -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._over.set)

    async def wait(self) -> None:
        await self._over.wait()

    @property
    def is_over(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        return self._future.result(0)


class ThreadLane:
    """One thread of its own: between two calls there is no turn of the event loop."""

    def __init__(self, name: str = "lane") -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, fn: Callable[..., T], *args: object) -> Ticket[T]:
        return _ThreadTicket(self._executor.submit(fn, *args))

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        ticket = self.submit(fn, *args)
        with anyio.CancelScope(shield=True):
            await ticket.wait()
        return ticket.result()


class _LazyTicket:
    def __init__(self, fn: Callable[..., Any], args: tuple[object, ...]) -> None:
        self._call: tuple[Callable[..., Any], tuple[object, ...]] | None = (fn, args)
        self._result: Any = None
        self._error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._call is None

    async def wait(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self._call is None:
            return
        (fn, args), self._call = self._call, None
        try:
            self._result = fn(*args)
        except Exception as exc:
            self._error = exc

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class InlineOffload:
    """Runs in the caller, once it waits: for tests and the simulation. Tickets must be waited for in order."""

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        await anyio.lowlevel.checkpoint()
        return fn(*args)

    def submit(self, fn: Callable[..., T], *args: object) -> Ticket[T]:
        return _LazyTicket(fn, args)
