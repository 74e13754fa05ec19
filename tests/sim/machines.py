"""The services of the simulation: the real ones, each in a process of its own, without HTTP, threads or torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from services.decode.worker import DecodeWorker
from services.engine.block_pool import BlockPool
from services.engine.engine import Engine
from services.engine.fake_runner import FakeRunner
from services.engine.planner import Planner, PlannerLimits
from services.engine.types import StepPlan, StepResult
from services.gateway.app import build_app
from services.gateway.generation import Services
from services.gateway.keeper import Keeper
from services.gateway.queue_ingress import QueueIngress
from services.gateway.queue_job import JobParts, QueueCounts
from services.gateway.redis_port import RedisRequestPort
from services.gateway.streams import Streams
from services.prefill.worker import PrefillWorker
from services.prefix_index.service import IndexService
from services.scheduler.service import Scheduler
from services.transfer import Fetched, Identity, Region, TransferReader
from shared.bus import RedisBus
from shared.errors import BatonError
from shared.ids import Incarnation, RequestId, WorkerId
from shared.leases import Leases
from shared.messages import PROTOCOL_VERSION, Registration, Role, SourceRef
from shared.redis_link import RedisLink
from shared.roster import Roster
from shared.submissions import Submissions
from shared.worker_link import Stuck, WorkerLink
from tests.sim.calls import BLOCK, Words
from tests.sim.lane import StepOffload
from tests.sim.loop import Proc
from tests.sim.redis_sim import SimClient

if TYPE_CHECKING:
    from tests.sim.world import World

FINGERPRINT = "sim"
DRAIN_S = 3.0


class Life:
    """One life of a process: what dies with it."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name = world, name
        self.incarnation = Incarnation(f"{name}.{number}")
        self.proc = Proc(self.incarnation)
        self.client = SimClient(world.redis)
        self.clock = world.clock_of_a_life()
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()  # dead or ended: nothing of it reaches the world any more
        self.ready = False
        self.slowness = 1.0
        self.slow_steps, self.slow_steps_until = 1.0, 0.0  # steps handed in while it was slow may end after that
        self.hung = False
        self.gave_up = False  # it has found that a step does not end
        self.hangs = anyio.Event()  # a step that never ends has begun
        self.stopping = anyio.Event()  # SIGTERM
        self.exit = ""
        self.disturbed_at = 0.0  # last time that it could not hear or act
        self.troubles: list[tuple[float, float]] = []  # when it could not
        link = RedisLink(world.settings.redis, self.clock, self.client)
        self.link, self.keys, self.randomness = link, world.keys, world.randomness
        self.leases = Leases(link, self.keys, self.randomness)
        self.roster = Roster(link, self.keys, world.settings.lease.heartbeat_s)
        self.bus = RedisBus(link, self.clock)
        # of workers
        self.engine: Engine | None = None
        self.pool: BlockPool | None = None
        self.worker: PrefillWorker | DecodeWorker | None = None
        # of gateways
        self.services: Services | None = None
        self.tasks: anyio.abc.TaskGroup | None = None
        # of the index
        self.index: IndexService | None = None
        self.scheduler: Scheduler | None = None

    @property
    def is_alive(self) -> bool:
        return not self.over.is_set()

    @property
    def is_blind(self) -> bool:
        """It cannot hear or act just now."""
        return self.proc.frozen or self.client.partitioned

    def step_s(self) -> float:
        """So long a step may take just now."""
        is_late = self.world.clock.now() <= self.slow_steps_until + 0.01
        return 0.1 * (self.slow_steps if is_late else self.slowness) * self.world.plan.pace

    def wake(self, now: float, blind_s: float) -> None:
        """It can hear and act again."""
        self.disturbed_at = now
        self.troubles.append((now - blind_s, now))

    async def live(self, main: Callable[[Life], Awaitable[None]]) -> None:
        """The process, from start to exit."""
        try:
            with self.scope:
                await main(self)
        except* BatonError as group:
            self.exit = self.exit or type(leaf(group)).__name__
        except* Exception as group:
            self.world.violate(f"{self.incarnation} crashed: {leaf(group)!r}", leaf(group))
        finally:
            self.over.set()
            self.client.severed = True
            if self.worker is not None:
                self.worker.outbox.close()


def leaf(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


def watch_fetches(life: Life, reader: TransferReader) -> None:
    """Tell the judge of each fetch that came out well."""
    fetch = reader.fetch

    async def watched(source: SourceRef, request_id: RequestId, epoch: int, *rest: Any) -> Fetched:
        fetched = await fetch(source, request_id, epoch, *rest)
        life.world.judge.fetched(life, request_id, epoch)
        return fetched

    reader.fetch = watched  # type: ignore[method-assign]


class WatchedRunner:
    """The fake runner; what it asserts and what it must never see are violations."""

    def __init__(self, life: Life, inner: FakeRunner) -> None:
        self._life, self._inner = life, inner
        self.block_bytes = inner.block_bytes

    def run(self, plan: StepPlan) -> StepResult:
        world, life = self._life.world, self._life
        if life.client.severed:
            raise RuntimeError("the process is dead")
        for item in plan.items:
            world.judge.work_seen(life, item.seq_id, plan.step)
            world.judge.hints.work_seen(life, item, plan.step)
        if world.should_fail_step():
            raise RuntimeError("injected")
        try:
            return self._inner.run(plan)
        except AssertionError as exc:
            world.violate(f"{life.incarnation}: wrong KV: {exc}", exc)
            raise


@dataclass
class WatchedDuties:
    """Passes everything on; tells the judge when a cancel, or a hint, has arrived."""

    life: Life
    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def cancel(self, request_id: Any, epoch: int, reason: str) -> None:
        assert self.life.engine is not None
        self.inner.cancel(request_id, epoch, reason)
        self.life.world.judge.cancel_heard(self.life, request_id, epoch, self.life.engine.stats().steps)

    def cancel_choice(self, request_id: Any, epoch: int, choice: int) -> None:
        assert self.life.engine is not None
        is_known = f"{request_id}/{epoch}/0" in self.inner._jobs  # else it comes too early
        self.inner.cancel_choice(request_id, epoch, choice)
        if is_known:
            self.life.world.judge.hints.told(self.life, request_id, epoch, choice, self.life.engine.stats().steps)


def build_engine(life: Life) -> tuple[Engine, Region]:
    config = life.world.settings.engine
    inner = FakeRunner(config.num_blocks, BLOCK, thorough=life.world.plan.thorough)
    region = Region.__new__(Region)
    region.num_blocks, region.block_bytes, region.fd = config.num_blocks, inner.block_bytes, -1
    region.buffer = inner.region
    limits = PlannerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(config.num_blocks * BLOCK, 160),
    )
    life.pool = BlockPool(config.num_blocks, BLOCK)
    runner = WatchedRunner(life, inner)
    life.engine = Engine(Planner(life.pool, limits), runner, StepOffload(life), life.clock)
    return life.engine, region


def registration(life: Life, role: Role, endpoints: tuple[Any, ...]) -> Registration:
    config = life.world.settings.engine
    return Registration(
        worker_id=WorkerId(life.name),
        incarnation=life.incarnation,
        role=role,
        model="sim",
        fingerprint=FINGERPRINT,
        protocol=PROTOCOL_VERSION,
        block_size=BLOCK,
        num_blocks=config.num_blocks,
        max_model_len=min(config.num_blocks * BLOCK, 160),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        endpoints=endpoints,
    )


async def prefill_main(life: Life) -> None:
    world, settings = life.world, life.world.settings
    life.link.be_patient()
    engine, region = build_engine(life)
    key = await life.leases.deployment_key()
    identity = Identity(life.incarnation, FINGERPRINT)
    source = world.network.source(region, identity, key, settings.transfer)
    worker = PrefillWorker(
        *(life.incarnation, engine, source, life.leases),
        *(settings.lease.lease_s, registration(life, "prefill", ()).max_model_len, settings.scheduler.max_attempts),
    )
    life.worker = worker
    async with anyio.create_task_group() as tasks:
        await tasks.start(source.serve)
        await _serve_worker(life, worker, registration(life, "prefill", (source.endpoint(),)), tasks, key)


async def decode_main(life: Life) -> None:
    world, settings = life.world, life.world.settings
    life.link.be_patient()
    engine, region = build_engine(life)
    identity = Identity(life.incarnation, FINGERPRINT)
    reader = world.network.reader(region, identity, settings.transfer, StepOffload(life))
    watch_fetches(life, reader)
    worker = DecodeWorker(
        *(life.incarnation, engine, reader, life.leases),
        *(settings.lease.lease_s, registration(life, "decode", ()).max_model_len, settings.scheduler.max_attempts),
    )
    life.worker = worker
    async with anyio.create_task_group() as tasks:
        await tasks.start(reader.serve)
        await _serve_worker(life, worker, registration(life, "decode", ()), tasks)


async def _serve_worker(
    life: Life,
    worker: PrefillWorker | DecodeWorker,
    reg: Registration,
    tasks: anyio.abc.TaskGroup,
    secret: bytes | None = None,
) -> None:
    duties = WatchedDuties(life, worker)
    link = WorkerLink(
        *(reg, duties, life.bus, life.keys, life.leases, life.roster, life.clock, life.world.settings.lease, secret)
    )
    await tasks.start(worker.run, link)
    tasks.start_soon(link.read)
    tasks.start_soon(_renew, life, link)
    await tasks.start(link.beat)
    life.ready = True
    await life.stopping.wait()
    await link.drain(worker.idle, DRAIN_S)
    life.exit = "drained"
    tasks.cancel_scope.cancel()


async def _renew(life: Life, link: WorkerLink) -> None:
    try:
        await link.renew()
    except Stuck:
        life.gave_up = True
        raise


async def scheduler_main(life: Life) -> None:
    settings = life.world.settings
    life.scheduler = Scheduler(
        *(life.bus, life.keys, life.leases, life.roster, life.incarnation, life.clock, life.randomness),
        *(lambda: life.link.last_outage, settings.scheduler, settings.lease),
    )
    await life.scheduler.run()


async def index_main(life: Life) -> None:
    life.index = IndexService(life.bus, life.keys, life.roster, life.clock, life.world.settings.index)
    await life.index.run()


class NoGrammars:
    """Nobody asks for a grammar here."""


async def gateway_main(life: Life) -> None:
    settings = life.world.settings
    port = RedisRequestPort(
        *(life.incarnation, life.leases, life.roster, life.bus, life.keys, life.clock, settings.gateway.max_queued)
    )
    app = build_app(
        port=port,
        tokenizer=Words(),  # type: ignore[arg-type]
        model_name="sim",
        incarnation=life.incarnation,
        config=settings.gateway,
        clock=life.clock,
        randomness=life.randomness,
        offload=StepOffload(life),
        grammars=NoGrammars(),  # type: ignore[arg-type]
    )
    streams: Streams = app.state.streams
    keeper = Keeper(port, streams, life.clock, settings.lease, settings.gateway.queue_timeout_s)
    submissions = Submissions(
        *(life.link, life.keys, life.clock, life.randomness, life.incarnation, settings.gateway.result_ttl_s)
    )
    shared = JobParts(app.state.parts, app.state.endpoints, submissions, life.leases, QueueCounts())
    ingress = QueueIngress(submissions, shared, life.clock, settings.gateway)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(streams.run)
        tasks.start_soon(keeper.run)
        life.tasks, life.services = tasks, app.state.parts.services
        async with anyio.create_task_group() as serving:
            serving.start_soon(ingress.run)
            life.ready = True
            await life.stopping.wait()
            life.ready = False
            serving.cancel_scope.cancel()
        await _end_calls(life, streams)
        life.exit = "drained"
        tasks.cancel_scope.cancel()


async def _end_calls(life: Life, streams: Streams) -> None:
    """Let what was begun over HTTP end; what has not by then is told so."""
    calls, until = life.world.judge.calls_of(life), life.clock.now() + DRAIN_S
    while life.clock.now() < until and any(call.is_open for call in calls):
        await life.clock.sleep(0.05)
    streams.refuse_all("shutting_down")
    await life.clock.sleep(0.2)


MAINS: dict[str, Callable[[Life], Awaitable[None]]] = {
    "prefill": prefill_main,
    "decode": decode_main,
    "scheduler": scheduler_main,
    "index": index_main,
    "gateway": gateway_main,
}
