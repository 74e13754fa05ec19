"""`baton status`: one table per running stack, from its state file and its services' own answers."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Mapping

import anyio
import httpx
from rich.table import Table

from services.cli.probe import local_client
from services.cli.procinfo import ProcessId
from services.cli.rundir import RunDir, RunState, ServiceState

# Metric names without `baton_<service>_`; a figure is shown where a service has all its metrics.
_FIGURES = (
    ("open", ("open_requests",)),
    ("done", ("requests_total",)),
    ("tokens out", ("generated_tokens_total",)),
    ("cached prompt tokens", ("cached_prompt_tokens_total", "prompt_tokens_total")),
    ("workers", ("num_workers",)),
    ("queued", ("num_waiting",)),
    ("in flight", ("num_in_flight",)),
    ("handed off", ("num_handoffs_total", "num_dispatched_total")),
    ("index entries", ("num_entries",)),
    ("running", ("engine_num_running",)),
    ("waiting", ("engine_num_waiting",)),
    ("blocks free", ("engine_blocks_free", "engine_blocks_total")),
    ("blocks read", ("transfer_blocks_read_total",)),
)
_WHERE_ANY = (
    ("blocks sent over TCP", "transfer_blocks_sent_total"),
    ("refused", "refused_total"),
    ("requeued", "num_requeued_total"),
    ("failed", "failed_total"),
    ("fetches failed", "fetch_failed_total"),
    ("failed steps", "engine_failed_steps_total"),
    ("preemptions", "engine_preemptions_total"),
)
_SERVICE = re.compile(r"^baton_(?:gateway|scheduler|prefix_index|prefill|decode)_")
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


def metrics_text(state: RunState) -> str:
    """Where each service's metrics are, a line each."""
    return "\n".join(f"  {s.name:<14} {s.url}/metrics" for s in state.services if s.url)


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
            with contextlib.suppress(ValueError):
                value = float(match[2])
                sums[match[1]] += value
    return dict(sums)


def figures(metrics: Mapping[str, float]) -> str:
    """A service's key numbers in words. Ratios are shown as `part/whole`; what a service has not, it does not show."""
    values = {_SERVICE.sub("", name): value for name, value in metrics.items()}
    shown: list[str] = []
    for label, names in _FIGURES:
        numbers = [values[name] for name in names if name in values]
        if len(numbers) == len(names):
            shown.append(f"{label} {'/'.join(f'{number:.0f}' for number in numbers)}")
    shown += [f"{label} {values[name]:.0f}" for label, name in _WHERE_ANY if values.get(name)]
    if count := values.get("ttft_seconds_count"):
        shown.append(f"mean TTFT {1000 * values['ttft_seconds_sum'] / count:.0f} ms")
    if count := values.get("tpot_seconds_count"):
        shown.append(f"mean TPOT {1000 * values['tpot_seconds_sum'] / count:.0f} ms")
    return ", ".join(shown)
