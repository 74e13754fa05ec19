"""The prefill worker as a service."""

import anyio
import structlog

from services.engine.host import ENGINE_COUNTERS, EngineHost, stalled
from services.prefill.worker import PrefillWorker
from services.transfer import Identity, Region, socket_source
from shared.addresses import reachable_host, worker_name
from shared.config import DRAIN_S
from shared.health import Probes, serve_http
from shared.metrics import Metrics
from shared.offload import ThreadLane, ThreadOffload
from shared.process import Process
from shared.worker_cell import WorkerCell

log = structlog.get_logger(__name__)
COUNTERS = ("requests", "handed_off", "finished_here", "cancelled", "expired", "failed")
SOURCE_COUNTERS = (
    *("bytes_sent", "blocks_sent", "bytes_filler", "reads", "refused", "malformed", "stale", "released", "expired"),
    "withdrawn",
)


async def serve(process: Process) -> None:
    """The process's main: until SIGTERM, then what was begun is handed over or finished."""
    settings, clock = process.settings, process.clock
    cell = WorkerCell.of(process)
    host = EngineHost.open(settings, parks=False)  # what prefill computes is announced, and never preempted
    region = Region.create(host.num_blocks, host.block_bytes)
    engine = await host.start(region.buffer, ThreadLane("engine"), clock)
    identity = Identity(process.incarnation, host.model.fingerprint)
    key = await cell.leases.deployment_key()
    where = settings.worker
    source = socket_source(
        region,
        identity,
        key,
        settings.transfer,
        clock,
        host=where.host,
        port=where.port,
        run_dir=where.run_dir,
        advertise=reachable_host(where),
    )
    worker = PrefillWorker(
        *(process.incarnation, engine, source, cell.leases),
        *(settings.lease.lease_s, host.max_model_len, settings.scheduler.max_attempts),
    )
    metrics = Metrics("prefill", worker=worker_name(where))
    metrics.stats(worker.stats, COUNTERS)
    metrics.stats(engine.stats, ENGINE_COUNTERS, part="engine")
    metrics.stats(source.stats, SOURCE_COUNTERS, part="transfer")
    registered = anyio.Event()
    probes = Probes(
        stalled(engine, clock, settings.lease.lease_s), lambda: (registered.is_set(), host.facts()), metrics
    )
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_http, where.host, where.health_port, probes)
        await tasks.start(source.serve)
        registration = host.registration(
            process.incarnation, "prefill", (source.endpoint(),), f"http://{reachable_host(where)}:{port}"
        )
        link = cell.link(registration, worker, key)
        await tasks.start(worker.run, link)
        tasks.start_soon(link.read)
        tasks.start_soon(link.renew)
        await tasks.start(link.beat)
        registered.set()
        tasks.start_soon(region.populate, settings.engine.prefault_bytes, ThreadOffload(1))
        await process.stopping.wait()
        await link.drain(worker.idle, DRAIN_S)
        tasks.cancel_scope.cancel()
