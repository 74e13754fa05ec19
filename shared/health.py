"""`/health`, `/ready` and `/metrics` of a service, and the HTTP server that they and the gateway share.

health: the process makes progress (its oldest blocked operation is not overdue)
ready:  it takes work now
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anyio
import anyio.abc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.errors import ConfigError
from shared.http_protocol import bounded_protocol
from shared.metrics import CONTENT_TYPE, Metrics
from shared.redis_link import RedisLink


@dataclass(frozen=True)
class Probes:
    """What a service says of itself. Each returns (is it well, details)."""

    health: Callable[[], tuple[bool, dict[str, object]]]
    ready: Callable[[], tuple[bool, dict[str, object]]]
    metrics: Metrics


def excused(
    check: Callable[[], tuple[bool, dict[str, object]]], link: RedisLink
) -> Callable[[], tuple[bool, dict[str, object]]]:
    """`check`, which says so where it fails because Redis is away: then nobody need restart this process."""

    def probe() -> tuple[bool, dict[str, object]]:
        well, details = check()
        return well, details if well or not link.is_down else {**details, "redis": "does not answer"}

    return probe


def probe_routes(probes: Probes) -> list[Route]:
    """`/health` and `/ready`: what a load balancer may see."""

    def answer(check: Callable[[], tuple[bool, dict[str, object]]], word: str) -> Callable[..., object]:
        async def endpoint(_request: Request) -> Response:
            well, details = check()
            body = {"status": word if well else f"not {word}", **details}
            return JSONResponse(body, status_code=200 if well else 503)

        return endpoint

    return [Route("/health", answer(probes.health, "healthy")), Route("/ready", answer(probes.ready, "ready"))]


def routes(probes: Probes) -> list[Route]:
    """The three routes, for a port that only operators reach."""

    async def metrics(_request: Request) -> Response:
        return Response(probes.metrics.render(), media_type=CONTENT_TYPE)

    return [*probe_routes(probes), Route("/metrics", metrics)]


@dataclass(frozen=True)
class HttpLimits:
    """What a server grants a connection. TLS files are PEM; "" = plain HTTP."""

    header_timeout_s: float = 10.0  # for a request's line and headers, and for a body that nobody waits for
    stall_s: float = 30.0  # in which the other end takes nothing of its answer
    max_connections: int = 4096
    tls_cert: str = ""
    tls_key: str = ""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    :raises ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}") from None
    sock.setblocking(False)
    return sock


async def serve_app(
    app: Starlette,
    sock: socket.socket,
    drain_s: float = 5.0,
    limits: HttpLimits = HttpLimits(),
    *,
    task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until cancelled; started means listening, and the value is the port.

    A cancelled server stops accepting and gives open answers `drain_s` to end.

    :raises ConfigError: the TLS files cannot be read, or do not belong together.
    """
    config = uvicorn.Config(
        app,
        http=bounded_protocol(limits.header_timeout_s, limits.max_connections, limits.stall_s),
        ws="none",
        ssl_certfile=limits.tls_cert or None,
        ssl_keyfile=limits.tls_key or None,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, int(drain_s)),
        timeout_keep_alive=75,
        h11_max_incomplete_event_size=64 << 10,
    )
    try:
        config.load()
    except OSError as exc:  # ssl.SSLError is one
        sock.close()
        raise ConfigError(f"TLS: {limits.tls_cert}, {limits.tls_key}: {exc.strerror or exc}") from None
    server = _Server(config)
    task_status.started(sock.getsockname()[1])
    async with anyio.create_task_group() as tasks:

        async def stop_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                server.should_exit = True

        tasks.start_soon(stop_when_cancelled)
        with anyio.CancelScope(shield=True):
            await server.serve(sockets=[sock])


async def serve_http(
    host: str,
    port: int,
    probes: Probes,
    *,
    task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve only the three routes; for services that have no HTTP face of their own."""
    app = Starlette(routes=routes(probes))
    await serve_app(app, bind(host, port), 1.0, task_status=task_status)
