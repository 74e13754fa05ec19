"""Work that must not run on the event loop: engine steps, large copies, digests."""

import asyncio
import atexit
import queue
import threading
import weakref
from collections.abc import Callable
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

    async def wait_at_most(self, seconds: float) -> bool:
        """As `wait`, but not for longer than this; whether the call is over, as far as the event loop was told."""
        with anyio.move_on_after(seconds):
            await self.wait()
        return self.is_over

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
    """Set over by the thread; who waits is told on its event loop."""

    __slots__ = ("_args", "_error", "_fn", "_loop", "_told", "_value", "_waiters", "is_over")

    def __init__(self, fn: Callable[..., Any], args: tuple[object, ...]) -> None:
        self._fn, self._args = fn, args
        self._value: Any = None
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._told = False
        self._waiters: list[asyncio.Future[None]] = []
        self.is_over = False

    def do(self) -> None:
        """In the thread."""
        try:
            self._value = self._fn(*self._args)
        except BaseException as exc:
            self._error = exc
        self._fn, self._args = _nothing, ()  # what the call held may go now
        self.is_over = True
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._tell)

    async def wait(self) -> None:
        if not self._told:
            await self._waiter()

    async def wait_at_most(self, seconds: float) -> bool:
        if not self._told and seconds > 0:
            waiter = self._waiter()
            timer = self._loop.call_later(seconds, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
        return self._told

    def result(self) -> Any:
        assert self.is_over
        if self._error is not None:
            raise self._error
        return self._value

    def _waiter(self) -> "asyncio.Future[None]":
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def _tell(self) -> None:
        self._told = True
        for waiter in self._waiters:
            _wake(waiter)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # by the other of the two, or given up
        waiter.set_result(None)


def _nothing() -> None: ...


class ThreadLane:
    """One thread of its own: between two calls there is no turn of the event loop. It is joined when the program ends,
    and ends after its last call when nobody has the lane any more."""

    def __init__(self, name: str = "lane") -> None:
        self._calls: queue.SimpleQueue[_ThreadTicket | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        thread.start()
        _threads[thread] = self._calls
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, fn: Callable[..., T], *args: object) -> Ticket[T]:
        ticket = _ThreadTicket(fn, args)
        self._calls.put(ticket)
        return ticket

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        ticket = self.submit(fn, *args)
        with anyio.CancelScope(shield=True):
            await ticket.wait()
        return ticket.result()


_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[_ThreadTicket | None]]"
_threads = weakref.WeakKeyDictionary()  # of all lanes


def _serve(calls: "queue.SimpleQueue[_ThreadTicket | None]") -> None:
    while (ticket := calls.get()) is not None:
        ticket.do()
        del ticket  # or the last call's result would live until the next one


def _join_all() -> None:
    """At the program's end no call may run on: what it uses is about to go."""
    for thread, calls in list(_threads.items()):
        calls.put(None)
        thread.join()


atexit.register(_join_all)


class _LazyTicket(Ticket[Any]):
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
