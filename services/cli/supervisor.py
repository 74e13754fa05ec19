"""The process table. The life of a service here:

waiting   its stage has not begun
starting  running, not yet ready
ready     it said so once since its last start
backoff   died, to be started again
stopped   asked to drain, and gone (or never started)

One that is ready and then hangs (no answer to /health, or one that says so) for HUNG_S, or is not ready after START_S,
is killed, which makes it one that died.

Services start in stages (the next one when all of the last are ready) and stop in the order of `stop_order`,
each group only when the one before is gone: what a drain needs must outlive the drain.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import anyio

from services.cli.restart import Record, RestartPolicy, after_death
from shared.clock import Clock

POLL_S = 0.1
AFTER_KILL_S = 5.0
HEALTH_EVERY_S = 5.0
HUNG_S = 60.0
"""Longer than anything that a service on a busy machine may take: a kill costs what the service has in its memory."""
START_S = 900.0
"""From start to ready, at most: large weights come from slow disks."""
MIN_HUNG_LOOKS = 4
"""So often in that time: a machine that slept is no service that hung."""
State = Literal["waiting", "starting", "ready", "backoff", "stopped"]


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to run. `ready` is a URL: http:// is asked with GET, redis+unix:// with PING."""

    name: str
    argv: tuple[str, ...]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()  # () = not pinned
    stage: int = 0
    stop_order: int = 0
    drain_s: float = 10.0  # from SIGTERM to SIGKILL


class Running(Protocol):
    """One live process."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Exit code, negative for a signal. May be awaited more than once."""
        ...

    def send(self, sig: signal.Signals) -> None:
        """No-op once the process is gone."""
        ...


class Spawner(Protocol):
    async def spawn(self, spec: ServiceSpec) -> Running:
        """:raises OSError: the program cannot be started."""
        ...


class Probe(Protocol):
    async def ready(self, spec: ServiceSpec) -> bool: ...

    async def hangs(self, spec: ServiceSpec) -> str:
        """Why the service makes no progress; "" if it does, or waits for another one."""
        ...


@dataclass(slots=True)
class Service:
    """A row of the table. Written by the Supervisor only."""

    spec: ServiceSpec
    state: State = "waiting"
    process: Running | None = None
    record: Record = field(default_factory=Record)
    restarts: int = 0
    stopping: bool = False
    started: float = 0.0  # its last life
    hung_since: float | None = None
    hung_looks: int = 0  # in a row


@dataclass(frozen=True, slots=True)
class Died:
    name: str
    code: int
    delay_s: float | None  # until the next start; None: given up


class Supervisor:
    """Keeps every service of one machine alive until told to stop."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        *,
        spawner: Spawner,
        probe: Probe,
        clock: Clock,
        policy: RestartPolicy | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_ready: Callable[[Service], None] = lambda _: None,
        on_death: Callable[[Died], None] = lambda _: None,
        on_hang: Callable[[Service, str], None] = lambda _, __: None,
    ) -> None:
        self.services = [Service(spec) for spec in specs]
        self._spawner, self._probe, self._clock = spawner, probe, clock
        self._policy = policy or RestartPolicy()
        self._on_change, self._on_ready, self._on_death, self._on_hang = on_change, on_ready, on_death, on_hang
        self._over = anyio.Event()
        self._aborted = False
        self.failure: Died | None = None

    async def run(self, on_all_ready: Callable[[], None] = lambda: None) -> Died | None:
        """Start everything, keep it alive until `stop`, drain it. What made it give up, or None."""
        async with anyio.create_task_group() as keepers:
            try:
                for stage in sorted({s.spec.stage for s in self.services}):
                    rows = [s for s in self.services if s.spec.stage == stage]
                    for row in rows:
                        keepers.start_soon(self._keep, row)
                    await self._until_ready(rows)
                    if self._over.is_set():
                        break
                if not self._over.is_set():
                    on_all_ready()
                    keepers.start_soon(self._poll_restarted)
                    keepers.start_soon(self._watch_health)
                await self._over.wait()
                await self._drain()
            finally:
                self._kill_all()
                keepers.cancel_scope.cancel()
        return self.failure

    def stop(self) -> None:
        """Drain and return from `run`. May be called from a signal's task, any number of times."""
        self._over.set()

    def abort(self) -> None:
        """As `stop`, without waiting for anything to finish."""
        self._aborted = True
        for row in self.services:
            row.stopping = True  # so that no death below looks like one to mend
        self.stop()
        self._kill_all()

    async def _keep(self, row: Service) -> None:
        """Start `row`, again and again, until it is to stop or the policy gives up."""
        while not row.stopping:
            started = self._clock.now()
            code = await self._live(row)
            if row.stopping:
                break
            life_s = self._clock.now() - started
            row.record, delay = after_death(self._policy, row.record, life_s=life_s, code=code)
            died = Died(row.spec.name, code, delay)
            self._on_death(died)
            if delay is None:
                self.failure = self.failure or died
                break
            row.restarts += 1
            self._move(row, "backoff")
            await self._clock.sleep(delay)
        self._move(row, "stopped")
        if self.failure:
            self.stop()

    async def _live(self, row: Service) -> int:
        """One life of `row`, from start to exit code."""
        self._move(row, "starting")
        try:
            row.process = await self._spawner.spawn(row.spec)
        except OSError as exc:
            return 127 if isinstance(exc, FileNotFoundError) else 126
        row.started = self._clock.now()
        self._on_change()
        try:
            if row.stopping or self._aborted:  # asked to stop while it was being started
                row.process.send(signal.SIGKILL)
            return await row.process.wait()
        finally:
            row.process = None

    async def _until_ready(self, rows: Sequence[Service]) -> None:
        """Until all rows are ready, or everything is over."""
        while not self._over.is_set():
            await self._ask(rows)
            if all(row.state == "ready" for row in rows):
                return
            await self._clock.sleep(POLL_S)

    async def _poll_restarted(self) -> None:
        while not self._over.is_set():
            await self._ask(self.services)
            await self._clock.sleep(2.5 * POLL_S)

    async def _ask(self, rows: Sequence[Service]) -> None:
        for row in rows:
            process = row.process
            if row.state != "starting" or process is None:
                continue
            if not await self._probe.ready(row.spec):
                self._limit_start(row, process)
                continue
            if row.process is process and row.state == "starting":  # the answer is this life's
                row.record = Record(row.record.deaths, was_ready=True)
                self._move(row, "ready")
                self._on_ready(row)

    def _limit_start(self, row: Service, process: Running) -> None:
        """Kill a service that does not get ready for so long that it hangs."""
        if row.process is process and self._clock.now() - row.started >= START_S:
            self._on_hang(row, "it does not get ready")
            process.send(signal.SIGKILL)

    async def _watch_health(self) -> None:
        while not self._over.is_set():
            await self._clock.sleep(HEALTH_EVERY_S)
            async with anyio.create_task_group() as tasks:  # together: each that hangs takes its time to tell
                for row in self.services:
                    if row.process is not None and row.state == "ready":
                        tasks.start_soon(self._look_at, row, row.process)

    async def _look_at(self, row: Service, process: Running) -> None:
        """Kill a service that has not moved at any look for `HUNG_S`."""
        why = await self._probe.hangs(row.spec)
        if row.process is not process or row.state != "ready" or row.stopping or not why:
            row.hung_since, row.hung_looks = None, 0
            return
        now = self._clock.now()
        row.hung_since = now if row.hung_since is None else row.hung_since
        row.hung_looks += 1
        if now - row.hung_since >= HUNG_S and row.hung_looks >= MIN_HUNG_LOOKS:
            row.hung_since, row.hung_looks = None, 0
            self._on_hang(row, why)
            process.send(signal.SIGKILL)

    async def _drain(self) -> None:
        for order in sorted({s.spec.stop_order for s in self.services}):
            rows = [s for s in self.services if s.spec.stop_order == order]
            for row in rows:
                row.stopping = True
                if row.process:
                    row.process.send(signal.SIGKILL if self._aborted else signal.SIGTERM)
            await self._gone(rows, max(row.spec.drain_s for row in rows))

    async def _gone(self, rows: Sequence[Service], bound_s: float) -> None:
        """Until all rows' processes are gone; those that overstay `bound_s` are killed."""
        with anyio.move_on_after(bound_s):
            for process in [row.process for row in rows if row.process]:
                await process.wait()
            return
        with anyio.move_on_after(AFTER_KILL_S):
            for process in [row.process for row in rows if row.process]:
                process.send(signal.SIGKILL)
                await process.wait()

    def _kill_all(self) -> None:
        for row in self.services:
            if row.process:
                row.process.send(signal.SIGKILL)

    def _move(self, row: Service, state: State) -> None:
        if row.state != state:
            row.state = state
            self._on_change()
