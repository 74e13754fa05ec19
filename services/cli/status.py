"""`baton status`: one table per running stack, from its state file and its services' own answers."""

import re
from collections import defaultdict
from collections.abc import Mapping

import anyio
import httpx
from rich.table import Table

from services.cli.probe import local_client
from services.cli.procinfo import ProcessId
from services.cli.rundir import RunDir, RunState, ServiceState

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)(?: \d+)?$")


def running(port: int | None) -> list[tuple[RunDir, RunState]]:
    """Stacks whose supervisor lives, on one port or on all."""
    folders = RunDir.all() if port is None else [RunDir(port)]
    found = [(folder, folder.load()) for folder in folders]
    return [(folder, state) for folder, state in found if state and state.supervisor.alive()]


async def table(state: RunState) -> Table:
    """The services of a stack with what each says about itself."""
    answers: dict[str, tuple[str, str]] = {}
    async with local_client() as client, anyio.create_task_group() as tasks:

        async def ask(service: ServiceState) -> None:
            answers[service.name] = await _health(client, service), await _figures(client, service)

        for service in state.services:
            tasks.start_soon(ask, service)
    out = Table(title=f"{state.url} · {state.model} · {state.phase} (supervisor {state.pid})", title_justify="left")
    for column in ("service", "pid", "health", "restarts", "figures"):
        out.add_column(column, justify="right" if column in ("pid", "restarts") else "left", overflow="fold")
    for service in state.services:
        health, figures = answers[service.name]
        out.add_row(service.name, str(service.pid or "-"), health, str(service.restarts), figures)
    return out


async def _health(client: httpx.AsyncClient, service: ServiceState) -> str:
    if not service.pid or not ProcessId(service.pid, service.start).alive():
        return f"[red]{service.state}, not running[/red]"
    if not service.url:
        return _coloured(service.state, service.state == "ready")
    try:
        ready = (await client.get(f"{service.url}/ready")).status_code
        health = (await client.get(f"{service.url}/health")).status_code
    except (httpx.HTTPError, OSError):
        return "[red]no answer[/red]"
    if health != 200:
        return f"[red]unhealthy ({health})[/red]"
    return _coloured("ready" if ready == 200 else f"not ready ({ready})", ready == 200)


def _coloured(text: str, good: bool) -> str:
    return f"[green]{text}[/green]" if good else f"[yellow]{text}[/yellow]"


async def _figures(client: httpx.AsyncClient, service: ServiceState) -> str:
    if not service.url:
        return ""
    try:
        answer = await client.get(f"{service.url}/metrics")
    except (httpx.HTTPError, OSError):
        return ""
    return figures(parse_metrics(answer.text)) if answer.status_code == 200 else ""


def parse_metrics(text: str) -> dict[str, float]:
    """Sum of every metric over its labels, from Prometheus' text format."""
    sums: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            try:
                sums[match[1]] += float(match[2])
            except ValueError:
                continue
    return dict(sums)


def figures(metrics: Mapping[str, float], limit: int = 6) -> str:
    """The few numbers of ours that are not zero, in words: no `_bucket`, `_created` or process metrics."""
    hidden = ("_bucket", "_created", "_sum", "_info")
    shown = [
        f"{name.removeprefix('baton_').removesuffix('_total').replace('_', ' ')} {value:g}"
        for name, value in metrics.items()
        if name.startswith("baton_") and value and not name.endswith(hidden)
    ]
    return ", ".join(shown[:limit])
