"""The gateway as a service: HTTP and submissions in, token streams out."""

from contextlib import suppress

import anyio
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.gateway.app import build_app
from services.gateway.gate import Gate
from services.gateway.grammar_check import ProcessGrammarChecker
from services.gateway.keeper import Keeper
from services.gateway.observer import PrometheusObserver
from services.gateway.queue_ingress import QueueIngress
from services.gateway.queue_job import JobParts, QueueCounts
from services.gateway.redis_port import RedisRequestPort
from services.gateway.streams import Streams
from shared.api_keys import ApiKeys
from shared.bus import RedisBus
from shared.clock import Clock
from shared.config import DRAIN_S, GatewayConfig
from shared.errors import BusError
from shared.health import HttpLimits, Probes, bind, probe_routes, routes, serve_app
from shared.leases import Leases
from shared.metrics import Metrics
from shared.model_path import model_name, resolve
from shared.offload import ThreadOffload
from shared.process import Process
from shared.rate_limits import RateLimits
from shared.roster import Roster
from shared.stream_lengths import StreamLengths
from shared.submissions import Submissions
from shared.tokenizer import load_tokenizer

log = structlog.get_logger(__name__)
LAST_WORDS_S = 2.0
"""What is open so long before the end of the drain is told that it ends."""
READY_EVERY_S = 0.2
LENGTHS_EVERY_S = 2.0
QUEUE_COUNTERS = ("taken", "answered", "refused", "dead", "repeats", "lost", "waits", "restarts")


class Readiness:
    """Ready = a decode worker lives; kept fresh in the background so that a probe never waits for Redis."""

    def __init__(self, port: RedisRequestPort) -> None:
        self._port = port
        self.num_workers = {"prefill": 0, "decode": 0}
        self.redis_answers = False

    async def watch(self, process: Process) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                live = await self._port.workers()
                self.redis_answers = True
            except BusError as exc:
                log.warning("gateway.no_redis", error=str(exc))
                live, self.redis_answers = [], False
            for role in self.num_workers:
                self.num_workers[role] = sum(1 for registration in live if registration.role == role)
            await process.clock.sleep(READY_EVERY_S)

    def ready(self) -> tuple[bool, dict[str, object]]:
        return self.redis_answers and self.num_workers["decode"] > 0, {"workers": dict(self.num_workers)}

    def health(self) -> tuple[bool, dict[str, object]]:
        return self.redis_answers, {} if self.redis_answers else {"redis": "does not answer"}


def stream_lengths(process: Process) -> StreamLengths:
    """Of the streams that all share, and this gateway's own."""
    keys = process.keys
    streams = {"sched": keys.sched().key, "kv": keys.kv().key, "index": keys.index().key, "submit": keys.submit()}
    streams |= {"dead": keys.dead(), "tokens": keys.tokens(process.incarnation).key}
    return StreamLengths(process.link, streams)


async def watch_lengths(lengths: StreamLengths, process: Process) -> None:
    """Look again and again, until cancelled. `Readiness` tells of a lost Redis."""
    while True:
        with suppress(BusError):
            await lengths.look()
        await process.clock.sleep(LENGTHS_EVERY_S)


async def end_streams(streams: Streams, clock: Clock) -> None:
    """The end of a drain that takes too long: an error, not a connection that breaks."""
    await clock.sleep(DRAIN_S - LAST_WORDS_S)
    log.warning("gateway.drain_is_over", open=len(streams))
    streams.refuse_all("shutting_down")


def queue_ingress(process: Process, app: Starlette, leases: Leases) -> QueueIngress:
    """Submissions through Redis, served by the endpoints of `app`."""
    config = process.settings.gateway
    submissions = Submissions(
        process.link, process.keys, process.clock, process.randomness, process.incarnation, config.result_ttl_s
    )
    shared = JobParts(app.state.parts, app.state.endpoints, submissions, leases, QueueCounts())
    return QueueIngress(submissions, shared, process.clock, config)


def gate_of(process: Process) -> Gate:
    """Keys and limits of the cell."""
    keys, limits = ApiKeys(process.link, process.keys), RateLimits(process.link, process.keys)
    return Gate(keys, limits, process.clock, process.settings.gateway.require_key)


def http_limits(config: GatewayConfig) -> HttpLimits:
    """Of the public port."""
    return HttpLimits(
        header_timeout_s=config.header_timeout_s,
        stall_s=config.client_stall_s,
        max_connections=config.max_connections,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
    )


def internal_app(probes: Probes, streams: Streams, process: Process) -> Starlette:
    """The port for operators: probes, `/metrics`, and `/debug`, which names open requests but shows no text."""

    async def debug(_request: Request) -> Response:
        return JSONResponse({"incarnation": process.incarnation, "open_requests": streams.look()})

    return Starlette(routes=[*routes(probes), Route("/debug", debug)])


def request_port(process: Process, leases: Leases) -> RedisRequestPort:
    """Where requests are admitted and cancelled."""
    return RedisRequestPort(
        process.incarnation,
        leases,
        Roster(process.link, process.keys, process.settings.lease.heartbeat_s),
        RedisBus(process.link, process.clock),
        process.keys,
        process.clock,
        process.settings.gateway.max_queued,
    )


async def serve(process: Process) -> None:
    """The process's main: until SIGTERM, then open answers end.

    :raises ConfigError: the port is taken.
    :raises ModelError: the model's tokenizer cannot be read.
    """
    settings = process.settings
    sock = bind(settings.gateway.host, settings.gateway.port)
    internal = bind(settings.gateway.internal_host, settings.gateway.internal_port)
    path = resolve(settings.model.path)
    offload = ThreadOffload(2)
    tokenizer = await offload.run(load_tokenizer, path)
    metrics = Metrics("gateway")
    leases = Leases(process.link, process.keys, process.randomness)
    port = request_port(process, leases)
    readiness = Readiness(port)
    probes = Probes(readiness.health, readiness.ready, metrics)
    app = build_app(
        port=port,
        tokenizer=tokenizer,
        model_name=settings.model.name or model_name(path),
        incarnation=process.incarnation,
        config=settings.gateway,
        clock=process.clock,
        randomness=process.randomness,
        offload=offload,
        grammars=ProcessGrammarChecker(
            path, timeout_s=settings.gateway.grammar_timeout_s, max_bytes=settings.gateway.max_grammar_bytes
        ),
        observer=PrometheusObserver(metrics),
        gate=gate_of(process),
        extra_routes=probe_routes(probes),
    )
    metrics.stats(
        lambda: {"open_requests": len(app.state.streams), "redis_outages_total": process.link.outages},
        counters=["redis_outages_total"],
    )
    keeper = Keeper(port, app.state.streams, process.clock, settings.lease, settings.gateway.queue_timeout_s)
    metrics.stats(lambda: {"readmitted_total": keeper.num_readmitted}, counters=["readmitted_total"])
    ingress = queue_ingress(process, app, leases)
    metrics.stats(ingress.counts, QUEUE_COUNTERS, part="submissions")
    lengths = stream_lengths(process)
    metrics.stats(lambda: lengths.lengths, part="stream_length")
    metrics.stats(lambda: lengths.memory, part="redis")
    debug_app = internal_app(probes, app.state.streams, process)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(readiness.watch, process)
        tasks.start_soon(keeper.run)  # during the drain too: a gateway that is silent is buried, its requests cancelled
        tasks.start_soon(watch_lengths, lengths, process)
        internal_port = await tasks.start(serve_app, debug_app, internal, 1.0)  # so too: to be looked at
        async with anyio.create_task_group() as serving:
            listening = await serving.start(serve_app, app, sock, DRAIN_S, http_limits(settings.gateway))
            serving.start_soon(ingress.run)
            log.info("service.listening", port=listening, internal_port=internal_port)
            await process.stopping.wait()
            log.info("gateway.drains", open=len(app.state.streams))
            tasks.start_soon(end_streams, app.state.streams, process.clock)
            serving.cancel_scope.cancel()
        tasks.cancel_scope.cancel()
