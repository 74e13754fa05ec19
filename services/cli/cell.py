"""The cell that a command means: the running stack's Redis, or another one."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import anyio
import msgspec
import typer

from services.cli.errors import CommandError
from services.cli.rundir import RunDir
from shared.clock import SystemClock
from shared.config import Settings, load, names_redis

if TYPE_CHECKING:
    from shared.keys import Keys
    from shared.redis_link import RedisLink

Port = Annotated[int | None, typer.Option(help="The stack's port (default 8000).", min=1, max=65535)]
Url = Annotated[str, typer.Option(help="A Redis, in place of the running stack's or the configuration's.")]


def with_cell(act: "Callable[[RedisLink, Keys], Awaitable[None]]", port: int | None, redis_url: str) -> None:
    """Run `act` with a link to the cell that is meant, and its keys.

    :raises BatonError: there is no such cell, or `act` failed.
    """
    from shared.keys import Keys  # here: other commands do without, and Redis takes a while to import
    from shared.redis_link import RedisLink

    async def run() -> None:
        settings = load()
        url = redis_url or redis_url_of(port, settings)
        link = RedisLink(msgspec.structs.replace(settings.redis, url=url, retry_s=1.0), SystemClock())
        try:
            await act(link, Keys(settings.redis.cell))
        finally:
            await link.close()

    anyio.run(run)


def redis_url_of(port: int | None, settings: Settings) -> str:
    """Of the running stack's Redis; without one, and without a port asked for, that which the configuration names.

    :raises CommandError: there is neither. The default address is not tried: whoever answers there is not ours.
    """
    asked = port or settings.gateway.port
    state = RunDir(asked).load()
    if state is not None and state.supervisor.alive():
        return state.redis_url
    if port is not None or not names_redis():
        raise CommandError(f"nothing runs on port {asked}; './baton up' starts it, and --redis-url names another Redis")
    return settings.redis.url
