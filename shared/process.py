"""How every service process begins and ends: settings, logs, one event loop, SIGTERM = drain, exit code."""

import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import structlog

from shared.clock import Clock, SystemClock
from shared.config import Settings, load
from shared.errors import BatonError, ConfigError, ModelError
from shared.ids import Incarnation
from shared.keys import Keys
from shared.logs import configure
from shared.randomness import Randomness, SystemRandomness
from shared.redis_link import RedisLink

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Process:
    """What `main` gets: the outside world, once."""

    settings: Settings
    incarnation: Incarnation
    clock: Clock
    randomness: Randomness
    link: RedisLink
    keys: Keys
    stopping: anyio.Event  # set by SIGTERM or SIGINT: drain, then return


def run(service: str, main: Callable[[Process], Awaitable[None]]) -> int:
    """Run a service to its end; the process's exit code. 0 after a drain, 2 for bad configuration, 1 otherwise."""
    try:
        settings = load()
    except ConfigError as exc:
        print(f"baton {service}: {exc}", file=sys.stderr)
        return 2
    configure(service, settings.log_format, settings.log_level)
    backend_options = {"use_uvloop": True} if sys.platform == "linux" else {}
    return anyio.run(_supervised, service, settings, main, backend_options=backend_options)


async def _supervised(service: str, settings: Settings, main: Callable[[Process], Awaitable[None]]) -> int:
    clock, randomness = SystemClock(), SystemRandomness()
    link = RedisLink(settings.redis, clock)
    incarnation = Incarnation(f"{service}-{randomness.token(6)}")
    process = Process(settings, incarnation, clock, randomness, link, Keys(settings.redis.cell), anyio.Event())
    structlog.contextvars.bind_contextvars(incarnation=incarnation)
    code = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_signals, process.stopping)
        try:
            version = await link.check_version()
            log.info("process.start", redis=version)
            await main(process)
            log.info("process.end")
        except* BatonError as group:
            code = 2 if group.subgroup((ConfigError, ModelError)) else 1  # neither gets better by trying again
            for exc in _leaves(group):
                log.error("process.failed", kind=type(exc).__name__, error=str(exc))
        except* Exception:
            code = 1
            log.exception("process.crashed")
        tasks.cancel_scope.cancel()
    await link.close()
    return code


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    out: list[BaseException] = []
    for exc in group.exceptions:
        out += _leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc]
    return out


async def _watch_signals(stopping: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            stopping.set()
