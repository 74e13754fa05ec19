"""An asyncio event loop whose time is virtual and whose order is chosen by a seed.

When nothing is ready, time jumps to the next timer. Each simulated process is a group of handles (found by a context
variable, which tasks and callbacks inherit): within a process the order is asyncio's, between processes it is the
seed's, as it would be between real event loops. A process can be frozen: its handles are kept until it thaws.
"""

import asyncio
import heapq
import random
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any
from unittest.mock import patch

from anyio import lowlevel
from anyio._backends._asyncio import CancelScope
from anyio._core import _eventloop, _synchronization, _tasks

START_S = 1000.0
IN_CALLBACK = "exception in a callback"
MIX_P = 0.3  # how often a turn begins with a change of order


class Deadlock(AssertionError):
    """Nobody waits for a time, and nobody can run."""


class Proc:
    """One life of a process, as the loop sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.stash: list[asyncio.Handle] = []

    def context(self) -> Context:
        """A context whose tasks belong to this process."""
        context = copy_context()
        context.run(PROC.set, self)
        return context


WORLD = Proc("world")
PROC: ContextVar[Proc] = ContextVar("PROC", default=WORLD)
NOBODYS = Context()
"""For callbacks of the world itself: never frozen."""


class NumberedTask(asyncio.Task[Any]):
    """A task that sets hold in the order of its number, not of its address: so that a run can be repeated."""

    _numbers = count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(NumberedTask._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _InOrder(dict[Any, None]):
    """A set that is iterated in the order of arrival."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]

    def discard(self, item: Any) -> None:
        self.pop(item, None)


_init_scope = CancelScope.__init__


def _init_in_order(scope: CancelScope, *args: Any, **kwargs: Any) -> None:
    """anyio cancels child scopes in the order of its set of them."""
    _init_scope(scope, *args, **kwargs)
    scope._child_scopes = _InOrder()  # type: ignore[assignment]


@contextmanager
def numbered() -> Iterator[None]:
    """Tasks are numbered from 0, and scopes keep their order; anyio need not find out each time which library runs."""
    NumberedTask._numbers = count()
    backend = _eventloop.get_async_backend("asyncio")
    with ExitStack() as stack:
        stack.enter_context(patch.object(CancelScope, "__init__", _init_in_order))
        for module in (_eventloop, _synchronization, _tasks, lowlevel):
            stack.enter_context(patch.object(module, "get_async_backend", lambda *_: backend))
        yield


class Timer(asyncio.TimerHandle):
    """One that the loop is not told of when it is cancelled: it looks when the time has come."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Callable[..., object], args: Any, loop: Any, context: Context | None
    ) -> None:
        asyncio.Handle.__init__(self, callback, args, loop, context)
        self._when = when
        self._scheduled = False

    def cancel(self) -> None:
        asyncio.Handle.cancel(self)


class _NoSelector:
    """Stands where `BaseEventLoop` closes its selector."""

    def close(self) -> None: ...


def _is_retry(handle: asyncio.Handle) -> bool:
    """anyio delivers a cancellation again in every turn until it is taken: that must not hold the time."""
    return getattr(handle._callback, "__name__", "") == "_deliver_cancellation"


class VirtualLoop(base_events.BaseEventLoop):
    """Deterministic for a seed, as long as its tasks are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._selector = _NoSelector()
        self.set_task_factory(lambda loop, coro, **kwargs: NumberedTask(coro, loop=loop, **kwargs))
        self._rng = random.Random(seed)
        self._now = START_S
        self._num_frozen = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self.turns = 0
        self._ready: deque[asyncio.Handle]

    def time(self) -> float:
        return self._now

    def current_name(self) -> str:
        """The process that runs just now."""
        return PROC.get().name

    def freeze(self, proc: Proc) -> None:
        """The process gets no turn until it thaws; time goes on without it."""
        if not proc.frozen:
            proc.frozen = True
            self._num_frozen += 1

    def thaw(self, proc: Proc) -> None:
        if proc.frozen:
            proc.frozen = False
            self._num_frozen -= 1
            self._ready.extend(proc.stash)
            proc.stash = []

    def start(self, proc: Proc, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """A task of that process."""
        return proc.context().run(self.create_task, coroutine)

    def call_in(self, proc: Proc, callback: Callable[[], object]) -> None:
        """Run something in that process, when its turn comes."""
        self.call_soon(callback, context=proc.context())

    def _run_once(self) -> None:
        self._move_time()
        ready = self._ready
        self.turns += 1
        if len(ready) > 1 and self._rng.random() < MIX_P:
            self._mix()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._num_frozen:
                proc = handle._context.get(PROC, WORLD)
                if proc.frozen:
                    proc.stash.append(handle)
                    continue
            try:  # what `Handle._run` does, without its frame
                handle._context.run(handle._callback, *handle._args)  # type: ignore[misc]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as exc:
                self.call_exception_handler({"message": IN_CALLBACK, "exception": exc})

    def _move_time(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready or (_is_retry(ready[0]) and all(map(_is_retry, ready))):
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Deadlock("nobody can run")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)

    def _mix(self) -> None:
        """One process's handles go to the end of the line."""
        last = self._rng.choice(self._ready)._context.get(PROC, WORLD)
        first, behind = [], []
        for handle in self._ready:
            (behind if handle._context.get(PROC, WORLD) is last else first).append(handle)
        self._ready.clear()
        self._ready.extend(first)
        self._ready.extend(behind)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = Timer(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    # --- what a loop without sockets, threads and signals does not have ---

    def _process_events(self, event_list: object) -> None: ...

    def _write_to_self(self) -> None: ...

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_soon(*args, **kwargs)
