"""An asyncio event loop whose time is virtual and whose order is chosen by a seed.

When nothing is ready, time jumps to the next timer. Each simulated process is a group of handles (found by a context
variable, which tasks and callbacks inherit): within a process the order is asyncio's, between processes it is the
seed's, as it would be between real event loops. A process can be frozen: its handles are kept until it thaws.
"""

import asyncio
import random
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from typing import Any
from unittest.mock import patch

from anyio import lowlevel
from anyio._backends import _asyncio
from anyio._backends._asyncio import CancelScope, TaskGroup, TaskState
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
        self.stash: list[Handle] = []

    def context(self) -> Context:
        """A context whose tasks belong to this process."""
        context = copy_context()
        context.run(PROC.set, self)
        return context


WORLD = Proc("world")
PROC: ContextVar[Proc] = ContextVar("PROC", default=WORLD)


class SimTask(asyncio.Task[Any]):
    """A task with a number: what has no order of its own is sorted by it, so that a run can be repeated."""

    number = 0

    def __repr__(self) -> str:
        """anyio writes it into the reason of each cancellation."""
        return f"task {self.number}"


class _InOrder(dict[Any, None]):
    """A set that is iterated in the order of arrival."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]

    def discard(self, item: Any) -> None:
        self.pop(item, None)


_init_scope = CancelScope.__init__
_DELIVER = CancelScope._deliver_cancellation.__name__


def _init_in_order(scope: CancelScope, *args: Any, **kwargs: Any) -> None:
    """anyio cancels tasks and child scopes in the order of its sets of them."""
    _init_scope(scope, *args, **kwargs)
    scope._child_scopes = _InOrder()  # type: ignore[assignment]
    scope._tasks = _InOrder()  # type: ignore[assignment]


def _start_lean(
    group: TaskGroup, func: Callable[..., Coroutine[Any, Any, Any]], *args: Any, name: object = None
) -> None:
    """`TaskGroup.start_soon` without the handle that it gives back since anyio 4.14, with a scope and an event of its
    own: nobody here wants it."""
    scope = group.cancel_scope
    assert scope._active, "This task group is not active"
    task = asyncio.get_running_loop().create_task(func(*args))
    _asyncio._task_states[task] = TaskState(id(scope._host_task), scope)
    scope._tasks.add(task)
    group._tasks.add(task)
    task.add_done_callback(partial(_lean_ended, group))


def _lean_ended(group: TaskGroup, task: asyncio.Task[Any]) -> None:
    state = _asyncio._task_states.pop(task)
    assert state.cancel_scope is not None
    state.cancel_scope._tasks.remove(task)
    group._tasks.remove(task)
    waiting = group._on_completed_fut
    if waiting is not None and not group._tasks and not waiting.done():
        waiting.set_result(None)
    if not task.cancelled() and (exc := task.exception()) is not None:
        group._exceptions.append(exc)
        if not group.cancel_scope._effectively_cancelled:
            group.cancel_scope.cancel()


@contextmanager
def in_order() -> Iterator[None]:
    """Scopes keep their order, tasks are light; anyio need not find out each time which library runs, nor go by weak
    references to a task's scope (it removes those of ended tasks itself)."""
    backend = _eventloop.get_async_backend("asyncio")
    with ExitStack() as stack:
        stack.enter_context(patch.object(CancelScope, "__init__", _init_in_order))
        stack.enter_context(patch.object(_asyncio, "_task_states", {}))
        stack.enter_context(patch.object(TaskGroup, "start_soon", _start_lean))
        for module in (_eventloop, _synchronization, _tasks, lowlevel):
            stack.enter_context(patch.object(module, "get_async_backend", lambda *_: backend))
        yield


class Handle:
    """A callback in line, or one of a later time. The loop is not told when it is cancelled: it looks when the time has
    come. Without a context it is the world's own, which is never frozen."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_is_retry")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self._callback, self._args, self._context = callback, args, context
        self._cancelled = self._is_retry = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class _NoSelector:
    """Stands where `BaseEventLoop` closes its selector."""

    def close(self) -> None: ...


def _proc_of(handle: Handle) -> Proc:
    return WORLD if handle._context is None else handle._context.get(PROC, WORLD)


class VirtualLoop(base_events.BaseEventLoop):
    """Deterministic for a seed, as long as its tasks are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._selector = _NoSelector()
        self._random = random.Random(seed).random
        self._now = START_S
        self._num_frozen = 0
        self._timers: list[tuple[float, int, Handle]] = []
        self._num_timers = self._num_tasks = self._num_retries = 0
        self.turns = 0
        self._ready: deque[Handle]  # type: ignore[assignment]

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
            self._num_retries += sum(handle._is_retry for handle in proc.stash)
            proc.stash = []

    def start(self, proc: Proc, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """A task of that process."""
        return proc.context().run(self.create_task, coroutine)

    def call_in(self, proc: Proc, callback: Callable[[], object]) -> None:
        """Run something in that process, when its turn comes."""
        self.call_soon(callback, context=proc.context())

    def strike(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Something of the world's own happens after `delay`, whoever is frozen."""
        return self._at(self._now + delay, Handle(callback, args, None))

    def _run_once(self) -> None:
        """Turns until somebody stops the loop."""
        ready, timers, rng = self._ready, self._timers, self._random
        while not self._stopping:
            if not ready or (self._num_retries and all(handle._is_retry for handle in ready)):
                self._move_time()
            while timers and timers[0][0] <= self._now:
                handle = heappop(timers)[2]
                if not handle._cancelled:
                    ready.append(handle)
            self.turns += 1
            waiting = len(ready)
            if waiting > 1 and rng() < MIX_P:
                self._mix(ready[int(rng() * waiting)])
            for _ in range(waiting):
                handle = ready.popleft()
                if handle._is_retry:
                    self._num_retries -= 1
                if handle._cancelled:
                    continue
                context = handle._context
                try:
                    if context is None:
                        handle._callback(*handle._args)
                    elif self._num_frozen and (proc := context.get(PROC, WORLD)).frozen:
                        proc.stash.append(handle)
                    else:
                        context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as exc:
                    self.call_exception_handler({"message": IN_CALLBACK, "exception": exc})

    def _move_time(self) -> None:
        """To the next timer, as nobody can run now."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not timers:
            raise Deadlock("nobody can run")
        self._now = max(self._now, timers[0][0])

    def _mix(self, one: Handle) -> None:
        """All of one process's handles go to the end of the line."""
        last = _proc_of(one)
        first, behind = [], []
        for handle in self._ready:
            (behind if _proc_of(handle) is last else first).append(handle)
        self._ready.clear()
        self._ready.extend(first)
        self._ready.extend(behind)

    def _at(self, when: float, handle: Handle) -> Handle:
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self._at(when, Handle(callback, args, copy_context() if context is None else context))

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self._at(self._now + delay, Handle(callback, args, copy_context() if context is None else context))

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        if context is not None:
            handle = Handle(callback, args, context)
        else:
            handle = Handle(callback, args, copy_context())
            if getattr(callback, "__name__", "") == _DELIVER:
                # anyio delivers a cancellation again in every turn until it is taken: that must not hold the time
                handle._is_retry = True
                self._num_retries += 1
        self._ready.append(handle)
        return handle

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> SimTask:
        task = SimTask(coro, loop=self, name=name, context=context)
        self._num_tasks += 1
        task.number = self._num_tasks
        return task

    # --- what a loop without sockets, threads and signals does not have ---

    def _process_events(self, event_list: object) -> None: ...

    def _write_to_self(self) -> None: ...

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_soon(*args, **kwargs)
