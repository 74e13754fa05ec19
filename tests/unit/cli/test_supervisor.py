"""The process table, over processes that exist only here."""

import signal
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from services.cli.restart import RestartPolicy
from services.cli.supervisor import HEALTH_EVERY_S, HUNG_S, Died, Running, Service, ServiceSpec, Supervisor

pytestmark = pytest.mark.anyio
KILL, TERM = signal.SIGKILL, signal.SIGTERM


class FakeClock:
    """Time passes as fast as it is slept away."""

    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        return self.t

    def wall(self) -> float:
        return self.t

    async def sleep(self, seconds: float) -> None:
        self.t += seconds
        for _ in range(3):
            await anyio.lowlevel.checkpoint()


class FakeProcess:
    def __init__(self, pid: int, name: str, world: "World") -> None:
        self._pid, self.name, self._world = pid, name, world
        self._gone, self._code = anyio.Event(), 0

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> int:
        await self._gone.wait()
        return self._code

    def send(self, sig: signal.Signals) -> None:
        if self._gone.is_set():
            return
        self._world.signals.append((self.name, sig))
        if sig == KILL or self.name not in self._world.deaf:
            self.die(0 if sig == TERM else -sig)

    def die(self, code: int) -> None:
        self._code = code
        self._world.alive.pop(self.name, None)
        self._gone.set()


class World:
    """Spawner and probe in one: what runs, what was signalled, who refuses what."""

    def __init__(self) -> None:
        self.alive: dict[str, FakeProcess] = {}
        self.spawned: list[str] = []
        self.signals: list[tuple[str, signal.Signals]] = []
        self.deaf: set[str] = set()
        self.unready: set[str] = set()
        self.doomed: dict[str, int] = {}  # exit code of who dies at once
        self.hung: set[FakeProcess] = set()

    async def spawn(self, spec: ServiceSpec) -> Running:
        await anyio.lowlevel.checkpoint()
        process = FakeProcess(1000 + len(self.spawned), spec.name, self)
        self.spawned.append(spec.name)
        self.alive[spec.name] = process
        if spec.name in self.doomed:
            process.die(self.doomed[spec.name])
        return process

    async def ready(self, spec: ServiceSpec) -> bool:
        await anyio.lowlevel.checkpoint()
        return spec.name in self.alive and spec.name not in self.unready

    async def hangs(self, spec: ServiceSpec) -> str:
        await anyio.lowlevel.checkpoint()
        return "it does not answer" if self.alive.get(spec.name) in self.hung else ""


def spec(name: str, stage: int = 0, stop_order: int = 0, drain_s: float = 0.05) -> ServiceSpec:
    return ServiceSpec(
        name=name, argv=(name,), ready=f"http://{name}/ready", stage=stage, stop_order=stop_order, drain_s=drain_s
    )


class Bench:
    """A supervisor over a world, and what it told."""

    def __init__(self, *specs: ServiceSpec) -> None:
        self.world = World()
        self.deaths: list[Died] = []
        self.readied: list[str] = []
        self.hangs: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            specs,
            spawner=self.world,
            probe=self.world,
            clock=FakeClock(),
            policy=RestartPolicy(max_deaths=4, max_deaths_starting=2),
            on_ready=lambda row: self.readied.append(row.spec.name),
            on_death=self.deaths.append,
            on_hang=lambda row, why: self.hangs.append((row.spec.name, why)),
        )

    def row(self, name: str) -> Service:
        return next(s for s in self.supervisor.services if s.spec.name == name)

    async def run(self, *, then: Callable[[], None] | None = None) -> Died | None:
        with anyio.fail_after(5):
            return await self.supervisor.run(then or self.supervisor.stop)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_stages_start_one_after_another():
    """Nothing of a stage starts before all of the last one is ready."""
    bench = Bench(spec("late", stage=1), spec("early"))
    bench.world.unready = {"early"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.run)
        await until(lambda: bench.world.spawned == ["early"] and bench.supervisor.services[1].state == "starting")
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert bench.world.spawned == ["early"]
        bench.world.unready = set()
    assert bench.world.spawned == ["early", "late"]
    assert bench.readied == ["early", "late"]


async def test_it_drains_in_order_each_group_after_the_one_before():
    """The gateway's streams need the workers until they have ended."""
    bench = Bench(spec("worker", stop_order=1), spec("redis", stop_order=2), spec("gateway", stop_order=0))
    assert await bench.run() is None
    assert bench.world.signals == [("gateway", TERM), ("worker", TERM), ("redis", TERM)]
    assert not bench.world.alive


async def test_who_overstays_its_drain_is_killed():
    """SIGTERM, a bounded wait, SIGKILL; the others still drain."""
    bench = Bench(spec("deaf"), spec("next", stop_order=1))
    bench.world.deaf = {"deaf"}
    assert await bench.run() is None
    assert bench.world.signals == [("deaf", TERM), ("deaf", KILL), ("next", TERM)]


async def test_a_dead_service_is_started_again_and_counted():
    """A death, a new life, ready again."""
    bench = Bench(spec("a"), spec("b"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: bench.run(then=lambda: None))
        await until(lambda: bench.readied == ["a", "b"])
        bench.world.alive["a"].die(-9)
        await until(lambda: bench.readied == ["a", "b", "a"])
        assert bench.row("a").restarts == 1
        assert bench.row("b").restarts == 0
        bench.supervisor.stop()
    assert [(d.name, d.code) for d in bench.deaths] == [("a", -9)]
    assert bench.supervisor.failure is None


async def test_one_that_keeps_dying_at_its_start_stops_everything():
    """The failure is returned, and nothing is left running."""
    bench = Bench(spec("fine"), spec("doomed"))
    bench.world.doomed = {"doomed": 3}
    failure = await bench.run()
    assert failure is not None
    assert (failure.name, failure.code, failure.delay_s) == ("doomed", 3, None)
    assert bench.world.spawned.count("doomed") == 2
    assert not bench.world.alive


async def test_one_that_keeps_dying_later_stops_everything_too():
    """Every death that follows fast on the last counts, until the limit."""
    bench = Bench(spec("a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: bench.run(then=lambda: None))
        for life in range(1, 5):
            await until(lambda life=life: bench.readied.count("a") == life)
            bench.world.alive["a"].die(1)
    assert bench.supervisor.failure == Died("a", 1, None)


async def test_stop_during_the_start_drains_what_has_started():
    """A stop before anything is ready still ends cleanly."""
    bench = Bench(spec("a"), spec("b", stage=1))
    bench.world.unready = {"a"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.run)
        await until(lambda: "a" in bench.world.alive)
        bench.supervisor.stop()
    assert bench.world.signals == [("a", TERM)]
    assert bench.world.spawned == ["a"]


async def test_abort_kills_at_once_and_restarts_nothing():
    """The second Ctrl-C."""
    bench = Bench(spec("a", drain_s=60), spec("b", stop_order=1, drain_s=60))
    bench.world.deaf = {"a"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.run)
        await until(lambda: ("a", TERM) in bench.world.signals)
        bench.supervisor.abort()
    assert ("a", KILL) in bench.world.signals
    assert ("b", KILL) in bench.world.signals
    assert sorted(bench.world.spawned) == ["a", "b"]
    assert not bench.world.alive
    assert not bench.deaths


async def test_a_drain_restarts_what_it_still_needs():
    """A worker that dies while the gateway drains comes back: streams may be waiting for it."""
    bench = Bench(spec("gateway", drain_s=60), spec("worker", stop_order=1))
    bench.world.deaf = {"gateway"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.run)
        await until(lambda: ("gateway", TERM) in bench.world.signals)
        bench.world.alive["worker"].die(-9)
        await until(lambda: bench.world.spawned.count("worker") == 2)
        bench.world.alive["gateway"].die(0)
    assert not bench.world.alive


async def test_cancelling_the_supervisor_kills_its_services():
    """Whatever ends `run`, nothing stays behind."""
    bench = Bench(spec("a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: bench.run(then=lambda: None))
        await until(lambda: bench.readied == ["a"])
        tasks.cancel_scope.cancel()
    assert bench.world.signals == [("a", KILL)]


async def test_a_service_that_hangs_is_killed_and_started_again():
    """Its pid lives, it even was ready; but nothing moves, for longer than anything may take."""
    bench = Bench(spec("a"), spec("b"))
    world = bench.world
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: bench.run(then=lambda: None))
        await until(lambda: bench.readied == ["a", "b"])
        world.hung.add(world.alive["b"])
        await until(lambda: bench.readied == ["a", "b", "b"])
        bench.supervisor.stop()
    assert bench.hangs == [("b", "it does not answer")]
    assert ("b", KILL) in world.signals
    assert ("a", KILL) not in world.signals
    assert [died.code for died in bench.deaths] == [-KILL]


async def test_a_service_that_only_stumbles_is_left_alone():
    """Silent at some looks, with an answer in between, for ten times as long as a hang may last."""
    bench = Bench(spec("a"))
    world, clock = bench.world, bench.supervisor._clock
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: bench.run(then=lambda: None))
        await until(lambda: bench.readied == ["a"])
        while clock.now() < 10 * HUNG_S:
            for wait_s, hung in ((HUNG_S / 2, {world.alive["a"]}), (2 * HEALTH_EVERY_S, set[FakeProcess]())):
                world.hung = hung
                since = clock.now()
                await until(lambda since=since, wait_s=wait_s: clock.now() > since + wait_s)
        bench.supervisor.stop()
    assert bench.hangs == []
    assert KILL not in [sig for _, sig in world.signals]


async def test_a_service_that_never_gets_ready_is_given_up():
    """It lives, but nothing comes of it: killed, tried again, and then it is a failure with a name."""
    bench = Bench(spec("a"))
    bench.world.unready = {"a"}
    failure = await bench.run()
    assert failure == Died("a", -KILL, None)
    assert bench.hangs == [("a", "it does not get ready")] * 2
    assert bench.world.spawned == ["a", "a"]
