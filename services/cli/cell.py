"""The cell that a command means: the running stack's Redis, or another one."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import anyio
import msgspec
import typer

from services.cli.errors import CommandError
from services.cli.rundir import RunDir
from shared.clock import SystemClock
from shared.config import load

if TYPE_CHECKING:
    from shared.keys import Keys
    from shared.redis_link import RedisLink

Port = Annotated[int | None, typer.Option(help="The stack's port (default 8000).", min=1, max=65535)]
Url = Annotated[str, typer.Option(help="A Redis, in place of the running stack's.")]


def with_cell(act: "Callable[[RedisLink, Keys], Awaitable[None]]", port: int | None, redis_url: str) -> None:
    """Run `act` with a link to the cell that is meant, and its keys.

    :raises BatonError: there is no such cell, or `act` failed.
    """
    from shared.keys import Keys  # here: other commands do without, and Redis takes a while to import
    from shared.redis_link import RedisLink

    async def run() -> None:
        settings = load().redis
        url = redis_url or redis_url_of(port, settings.url)
        link = RedisLink(msgspec.structs.replace(settings, url=url, retry_s=1.0), SystemClock())
        try:
            await act(link, Keys(settings.cell))
        finally:
            await link.close()

    anyio.run(run)


def redis_url_of(port: int | None, configured: str) -> str:
    """Of the running stack's Redis; without one, and without a port asked for, the configuration's."""
    state = RunDir(port or 8000).load()
    if state is not None and state.supervisor.alive():
        return state.redis_url
    if port is not None:
        raise CommandError(f"nothing runs on port {port}; --redis-url names a Redis")
    return configured
