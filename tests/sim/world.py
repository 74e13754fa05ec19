"""One world: a Redis, the services, their clients and their misfortunes, in one loop on virtual time."""

from __future__ import annotations

import asyncio
import math
import traceback
from random import Random

import anyio

from shared.clock import Clock
from shared.config import (
    EngineConfig,
    GatewayConfig,
    LeaseConfig,
    RedisConfig,
    SchedulerConfig,
    Settings,
    TransferConfig,
)
from shared.keys import Keys
from shared.randomness import SeededRandomness
from tests.sim.calls import BLOCK, Call
from tests.sim.judge import Judge
from tests.sim.loop import VirtualLoop
from tests.sim.machines import MAINS, Life
from tests.sim.plan import Plan
from tests.sim.redis_sim import SimRedis
from tests.sim.submits import Submitter
from tests.sim.sufferings import Sufferings
from tests.sim.wire import WatchedNetwork

RESTART_S = 0.3
LOOK_S = 0.05
"""How exactly the moment is known at which all is quiet."""


class LoopClock:
    """The loop's virtual time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop._now

    def wall(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        loop = self._loop
        over = loop.create_future()
        timer = loop.call_later(max(0.0, seconds), _end_sleep, over)
        try:
            await over
        finally:
            timer.cancel()


def _end_sleep(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


class LifeClock(LoopClock):
    """A process's own clock: it starts anywhere, as monotonic clocks do, so that comparing two of them shows."""

    def __init__(self, loop: VirtualLoop, offset: float) -> None:
        super().__init__(loop)
        self._offset = offset

    def now(self) -> float:
        return self._loop._now + self._offset

    def skip(self, seconds: float) -> None:
        self._offset += seconds


def settings_of(plan: Plan) -> Settings:
    return Settings(
        redis=RedisConfig(cell="sim", retry_s=6.0),
        gateway=GatewayConfig(max_queued=plan.max_queued, max_submissions=16, submission_lease_s=2.0),
        scheduler=SchedulerConfig(
            min_handoff_tokens=6, growth_tokens=8, max_attempts=plan.max_attempts, reap_every_s=0.25
        ),
        lease=LeaseConfig(lease_s=2.0, heartbeat_s=0.4),
        engine=EngineConfig(
            block_size=BLOCK,
            num_blocks=plan.num_blocks,
            max_num_seqs=32 if plan.is_roomy else 12,
            max_num_batched_tokens=64 if plan.is_roomy else 24,
        ),
        transfer=TransferConfig(idle_timeout_s=4.0, hold_s=4.0),
    )


class World:
    """Owner of all that the services share, and of the faults. `violations` must stay empty."""

    def __init__(self, loop: VirtualLoop, plan: Plan, overrides: dict[str, str] | None, log: list[str]) -> None:
        self.loop, self.plan, self.log = loop, plan, log
        self.rng = Random(f"world {plan.seed}")
        self.clock: Clock = LoopClock(loop)
        self.began = loop.time()
        self.settings = settings_of(plan)
        self.keys = Keys("sim")
        self.randomness = SeededRandomness(plan.seed)
        self.redis = SimRedis(loop, Random(f"redis {plan.seed}"), overrides)
        self.network = WatchedNetwork(self)
        self.lives: dict[str, Life] = {}
        self.all_lives: list[Life] = []
        self.calls = [Call(ask) if ask.queued is None else Submitter(ask) for ask in plan.asks]
        self.submitters = {call.ask.name: call for call in self.calls if isinstance(call, Submitter)}
        self.num_wipes = 0
        self._num_answered = 0  # the first so many are
        self.quiet_s = math.inf  # from the last end of a request, or a client's leaving, until all was at rest
        self.violations: list[str] = []
        self.stopping = False
        self.failed = anyio.Event()
        self.step_fails = 0
        self.sufferings = Sufferings(self)
        self.heirs: dict[str, Life] = {}
        self.judge = Judge(self)

    def time(self) -> float:
        """Seconds since the start."""
        return self.loop.time() - self.began

    def clock_of_a_life(self) -> LifeClock:
        return LifeClock(self.loop, float(self.rng.randrange(1_000_000)))

    def note(self, text: str) -> None:
        self.log.append(f"{self.time():8.3f}s {text}")

    def violate(self, text: str, exc: BaseException | None = None) -> None:
        """Note a violation; the world ends."""
        where = "".join(traceback.format_exception(exc)[-6:]) if exc is not None else ""
        self.violations.append(f"{self.time():.3f}s {text}\n{where}".rstrip())
        self.failed.set()

    def should_fail_step(self) -> bool:
        if self.step_fails:
            self.step_fails -= 1
            return True
        return False

    # --- processes ---

    def slots(self) -> list[str]:
        plan = self.plan
        counts = {"prefill": plan.num_prefill, "decode": plan.num_decode, "gateway": plan.num_gateways}
        names = [f"{role}-{i}" for role, count in counts.items() for i in range(count)]
        return [*names, "scheduler-0", "index-0"]

    def new_life(self, name: str, number: int) -> Life:
        life = Life(self, name, number)
        self.all_lives.append(life)
        return life

    def start(self, life: Life) -> None:
        """Its process begins."""
        self.loop.start(life.proc, life.live(MAINS[life.name.split("-")[0]]))

    async def supervise(self, name: str) -> None:
        """Start the process, and start it again whenever it ends."""
        number = 0
        while not self.stopping:
            number += 1
            life = self.lives[name] = self.new_life(name, number)
            self.start(life)
            await life.over.wait()
            while (heir := self.heirs.pop(life.incarnation, None)) is not None:
                self.bury(life)
                life = heir  # started beside it
                await life.over.wait()
            if life.exit:
                self.note(f"{life.incarnation} exits: {life.exit}")
            self.bury(life)
            await self.clock.sleep(RESTART_S)

    def bury(self, life: Life) -> None:
        """Nothing of a dead process reaches anybody, and what waits for it learns that it is gone."""
        life.client.severed = True
        service = self.network.services.pop(life.incarnation, None)
        if service is not None:
            self.network.cut(service)
        self.network.cut(reader=life.incarnation)
        if life.name.startswith("gateway"):
            for call in self.judge.calls_of(life):
                if call.is_open:
                    call.broken = True
                    call.end("broken", self.clock.now())

    def crash(self, life: Life) -> None:
        """SIGKILL."""
        if life.is_alive:
            self.bury(life)
            self.loop.thaw(life.proc)
            life.over.set()
            life.scope.cancel()

    # --- clients ---

    async def client(self, call: Call | Submitter) -> None:
        """Arrives, finds a gateway, talks, perhaps leaves early; or goes through the queue."""
        if isinstance(call, Submitter):
            await call.run(self)
            return
        await self.clock.sleep(call.ask.at)
        while (life := self._gateway()) is None:
            await self.clock.sleep(0.05)
        assert life.tasks is not None
        assert life.services is not None
        self.judge.began(call, life)
        life.proc.context().run(life.tasks.start_soon, call.talk, life.services, life.incarnation, self)
        if call.ask.leaves_after is not None:
            await self.clock.sleep(call.ask.leaves_after)
            self.loop.call_in(life.proc, call.scope.cancel)

    def _gateway(self) -> Life | None:
        ready = [self.lives[s] for s in self.slots() if s.startswith("gateway") and s in self.lives]
        ready = [life for life in ready if life.ready and life.is_alive]
        return self.rng.choice(ready) if ready else None

    def all_answered(self) -> bool:
        while self._num_answered < len(self.calls) and not self.calls[self._num_answered].is_open:
            self._num_answered += 1
        return self._num_answered == len(self.calls)

    # --- the whole ---

    async def run(self, limit_s: float) -> None:
        """Until all clients are answered and everything is quiet, or something is violated."""
        async with anyio.create_task_group() as tasks:
            for slot in self.slots():
                tasks.start_soon(self.supervise, slot)
            for call in self.calls:
                tasks.start_soon(self.client, call)
            for fault in self.plan.faults:
                tasks.start_soon(self.sufferings.suffer, fault)
            tasks.start_soon(self._watch, limit_s)
            await self.failed.wait()
            self.stopping = True
            for life in self.all_lives:
                self.crash(life)
            tasks.cancel_scope.cancel()

    async def _watch(self, limit_s: float) -> None:
        """The end: somebody answered within each limit until all are, then quiet within another."""
        last = max([a.at for a in self.plan.asks] + [f.at + f.seconds for f in self.plan.faults])
        rounds = 0
        while not self.all_answered() or self.time() < last:
            await self.clock.sleep(LOOK_S)
            rounds += 1
            if rounds % 10:
                continue
            self.judge.look()
            heard = max((call.ended_at for call in self.calls), default=0.0) - self.began
            if self.time() > max(last, heard) + limit_s:
                stuck = [call.ask.name for call in self.calls if call.is_open]
                self.violate(f"nobody was answered for {limit_s} s: {stuck[:5]} wait")
                return
        for _ in range(int(limit_s / LOOK_S)):
            if not (loud := self.judge.noise()):
                self.quiet_s = self.clock.now() - self.judge.last_end
                break
            await self.clock.sleep(LOOK_S)
        else:
            self.violate(f"not quiet {limit_s} s after the end: {loud}")
        self.judge.final()
        self.failed.set()
