"""The decode worker as a service."""

import anyio
import structlog

from services.decode.worker import DecodeWorker
from services.engine.host import ENGINE_COUNTERS, EngineHost, stalled
from services.transfer import Identity, Region, socket_reader
from shared.addresses import reachable_host, worker_name
from shared.config import DRAIN_S
from shared.health import Probes, serve_http
from shared.metrics import Metrics
from shared.offload import ThreadLane, ThreadOffload
from shared.process import Process
from shared.worker_cell import WorkerCell

log = structlog.get_logger(__name__)
COUNTERS = ("requests", "landed", "computed_here", "fetch_failed", "finished", "cancelled", "failed", "choices_stopped")
READER_COUNTERS = (
    *("bytes_read", "blocks_read", "bytes_discarded", "reads", "refused", "stale", "digest_failures", "retries"),
    *("timeouts", "failed", "fetched", "links_shm", "links_tcp"),
)


async def serve(process: Process) -> None:
    """The process's main: until SIGTERM, then what was begun is finished."""
    settings, clock = process.settings, process.clock
    cell = WorkerCell.of(process)
    host = EngineHost.open(settings)
    region = Region.create(host.num_blocks, host.block_bytes)
    engine = await host.start(region.buffer, ThreadLane("engine"), clock)
    identity = Identity(process.incarnation, host.model.fingerprint)
    where = settings.worker
    reader = socket_reader(region, identity, settings.transfer, clock, ThreadOffload(2))
    worker = DecodeWorker(
        *(process.incarnation, engine, reader, cell.leases),
        *(settings.lease.lease_s, host.max_model_len, settings.scheduler.max_attempts),
    )
    metrics = Metrics("decode", worker=worker_name(where))
    metrics.stats(worker.stats, COUNTERS)
    metrics.stats(engine.stats, ENGINE_COUNTERS, part="engine")
    metrics.stats(reader.stats, READER_COUNTERS, part="transfer")
    registered = anyio.Event()
    probes = Probes(
        stalled(engine, clock, settings.lease.lease_s), lambda: (registered.is_set(), host.facts()), metrics
    )
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(serve_http, where.host, where.health_port, probes)
        await tasks.start(reader.serve)
        registration = host.registration(process.incarnation, "decode", (), f"http://{reachable_host(where)}:{port}")
        link = cell.link(registration, worker)
        await tasks.start(worker.run, link)
        tasks.start_soon(link.read)
        tasks.start_soon(link.renew)
        await tasks.start(link.beat)
        registered.set()
        tasks.start_soon(region.populate, settings.engine.prefault_bytes, ThreadOffload(1))
        await process.stopping.wait()
        await link.drain(worker.idle, DRAIN_S)
        tasks.cancel_scope.cancel()
