"""One `baton up`, from its options to its end: checks, the supervisor and what the user sees of it."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec

from services.cli.errors import CommandError
from services.cli.logs import LogSink
from services.cli.options import UpOptions, external_redis, settings_for
from services.cli.placement import worker_cores
from services.cli.plan import StackPlan, child_environ, num_ports, redis_spec, service_specs
from services.cli.ports import check_free, free_ports
from services.cli.probe import ServiceProbe, local_client
from services.cli.processes import ProcessSpawner
from services.cli.procinfo import ProcessId
from services.cli.redis_server import find_redis, redis_argv
from services.cli.restart import CONFIG_ERROR
from services.cli.rundir import RunDir, RunState, ServiceState, home
from services.cli.supervisor import HUNG_S, START_S, Died, Service, ServiceSpec, Supervisor
from shared.clock import Clock
from shared.config import Settings
from shared.errors import BusError
from shared.host_memory import free_memory_bytes, usable_cores

Say = Callable[[str], None]


class Stack:
    """A checked stack, ready to run. Making one takes the port's lock.

    :raises BatonError: anything that would keep it from starting, in one line.
    """

    def __init__(self, options: UpOptions, clock: Clock, say: Say, *, show_logs: bool) -> None:
        settings = settings_for(options)
        if settings.gateway.port == 0:
            settings = _with_port(settings, free_ports(1)[0])
        self.own_redis = not external_redis(options)
        binary = find_redis() if self.own_redis else None
        self.run_dir = RunDir(settings.gateway.port)
        self.run_dir.acquire()
        self.run_dir.clear_sockets()
        check_free(settings.gateway.host, settings.gateway.port)
        specs: list[ServiceSpec] = []
        if binary:
            socket = self.run_dir.socket_path("redis.sock")
            settings = _with_redis(settings, f"unix://{socket}?db=0")
            specs.append(
                redis_spec(redis_argv(binary, self.run_dir.redis, socket, settings.redis.max_memory_mb), socket)
            )
        worker = msgspec.structs.replace(
            settings.worker, run_dir=settings.worker.run_dir or self.run_dir.worker_sockets
        )
        # Measured once: a worker that looks later, or again after a restart, would count its siblings' memory as used.
        engine = msgspec.structs.replace(settings.engine, free_bytes=settings.engine.free_bytes or free_memory_bytes())
        settings = msgspec.structs.replace(settings, worker=worker, engine=engine)
        self.plan = StackPlan(
            settings=settings,
            num_prefill=options.prefill,
            num_decode=options.decode,
            cores=worker_cores(usable_cores(os.sched_getaffinity(0))),
            ports=tuple(free_ports(num_ports(options.prefill, options.decode))),
        )
        self.specs = specs + service_specs(self.plan)
        self._clock, self._say, self._show_logs = clock, say, show_logs
        self._started = clock.now()
        self._started_at = clock.wall()
        self._phase = "starting"
        self._stopping = False

    async def run(self, on_ready: Say) -> None:
        """Until a signal has stopped it. `on_ready(message)` is called once, when every service is ready.

        :raises CommandError: a service would not live.
        """
        if not self.own_redis:
            await _check_redis(self.plan.settings, self._clock)
        failure: Died | None = None
        sink = LogSink(self.run_dir.logs, self._show, quiet=frozenset({"redis"}))
        try:
            async with local_client() as client, anyio.create_task_group() as tasks:
                spawner = ProcessSpawner(tasks, self._clock, home(), child_environ(os.environ), sink.line)
                probe = ServiceProbe(client)
                supervisor = Supervisor(
                    self.specs,
                    spawner=spawner,
                    probe=probe,
                    clock=self._clock,
                    on_change=lambda: self._save(supervisor.services),
                    on_ready=self._back,
                    on_death=lambda died: self._died(died, sink),
                    on_hang=self._hangs,
                )
                tasks.start_soon(self._signals, supervisor)
                failure = await supervisor.run(lambda: self._all_ready(supervisor, probe, on_ready))
                tasks.cancel_scope.cancel()
        finally:
            self.run_dir.clear()
            sink.close()
        if failure:
            raise self._gave_up(failure, sink)

    def _all_ready(self, supervisor: Supervisor, probe: ServiceProbe, on_ready: Say) -> None:
        self._phase = "ready"
        self._save(supervisor.services)
        on_ready(self.ready_text(probe.details))

    def ready_text(self, details: Mapping[str, Mapping[str, Any]]) -> str:
        """What the user reads once everything runs. `details`: what the services say of themselves."""
        p, url = self.plan, self.plan.url
        roles = (
            f"{p.num_prefill} prefill, {p.num_decode} decode" if p.num_prefill else f"aggregated, {p.num_decode} decode"
        )
        took = self._clock.now() - self._started
        messages = '[{"role": "user", "content": "Hello!"}]'
        body = f'{{"model": "default", "stream": true, "temperature": 0, "messages": {messages}}}'
        lines = [
            f"Baton is ready: {url} ({p.settings.model.name}, {roles}) in {took:.1f} s",
            f"  try      curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            f"  metrics  {self._gateway_url()}/metrics",
            f"  logs     {_short(self.run_dir.logs)}",
        ]
        facts = [(name, details[name]) for _, name in p.workers if "blocks" in details.get(name, {})]
        lines[1:1] = [f"  {name:<8} {room_text(said)}" for name, said in facts]
        if len(p.workers) > len(p.cores):
            lines.append(f"  note     {len(p.workers)} workers share {len(p.cores)} cores: expect them to be slow")
        return "\n".join(lines)

    def _gateway_url(self) -> str:
        """Of the gateway's port for operators."""
        return next(s for s in self.specs if s.name == "gateway").ready.removesuffix("/ready")

    def _show(self, name: str, text: str) -> None:
        if self._show_logs:
            self._say("\n".join(f"[{name}] {line}" for line in text.splitlines()))

    def _back(self, row: Service) -> None:
        if row.restarts:
            self._say(f"[{row.spec.name}] is back")

    def _died(self, died: Died, sink: LogSink) -> None:
        if died.delay_s is not None and not self._stopping:
            self._say(f"[{died.name}] died ({exit_text(died.code)}); starting it again in {died.delay_s:g} s")
            if not self._show_logs:
                self._say(sink.last_lines(died.name))

    def _hangs(self, row: Service, why: str) -> None:
        limit_s = HUNG_S if row.state == "ready" else START_S
        self._say(f"[{row.spec.name}] has hung for {limit_s:g} s ({why}); killing it")

    def _gave_up(self, died: Died, sink: LogSink) -> CommandError:
        log = _short(self.run_dir.logs / f"{died.name}.log")
        how = "refuses to start" if died.code == CONFIG_ERROR else "keeps dying"
        return CommandError(
            f"{died.name} {how} ({exit_text(died.code)}); everything was stopped. Its log: {log}",
            details=sink.last_lines(died.name),
        )

    async def _signals(self, supervisor: Supervisor) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for _ in signals:
                if self._stopping:
                    self._say("Stopping at once.")
                    supervisor.abort()
                    continue
                self._stopping, self._phase = True, "stopping"
                self._say("Draining: requests in flight may finish. Once more stops at once.")
                self._save(supervisor.services)
                supervisor.stop()

    def _save(self, services: list[Service]) -> None:
        me = ProcessId.of(os.getpid())
        assert me is not None
        rows = [_row(s) for s in services]
        self.run_dir.save(
            RunState(
                pid=me.pid,
                start=me.start,
                phase=self._phase,
                url=self.plan.url,
                redis_url=self.plan.settings.redis.url,
                model=self.plan.settings.model.name,
                started_at=self._started_at,
                services=tuple(rows),
            )
        )


def room_text(facts: Mapping[str, Any]) -> str:
    """What a worker has room for."""
    shared = " (shared)" if facts["weights_shared"] else ""
    return (
        f"{facts['weights_mib']} MiB of weights{shared}, {facts['blocks']} KV blocks ({facts['kv_mib']} MiB), "
        f"{facts['context_tokens']} tokens of context, {facts['seqs_at_2k']} seqs of 2K tokens"
    )


def exit_text(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _row(service: Service) -> ServiceState:
    pid = service.process.pid if service.process else 0
    found = ProcessId.of(pid) if pid else None
    url = service.spec.ready.removesuffix("/ready") if service.spec.ready.startswith("http") else ""
    return ServiceState(
        name=service.spec.name,
        state=service.state,
        pid=pid if found else 0,
        start=found.start if found else 0,
        restarts=service.restarts,
        url=url,
    )


async def _check_redis(settings: Settings, clock: Clock) -> None:
    """:raises CommandError: the user's Redis does not answer, or is too old."""
    from shared.redis_link import RedisLink  # here, since most starts do without: it takes a while to import

    url = settings.redis.url
    try:
        link = RedisLink(msgspec.structs.replace(settings.redis, retry_s=1.0), clock)
    except ValueError as exc:
        raise CommandError(f"redis URL: {exc}") from None
    try:
        await link.check_version()
    except BusError as exc:
        raise CommandError(f"redis at {_no_password(url)}: {exc}") from None
    finally:
        await link.close()


def _no_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _with_port(settings: Settings, port: int) -> Settings:
    return msgspec.structs.replace(settings, gateway=msgspec.structs.replace(settings.gateway, port=port))


def _with_redis(settings: Settings, url: str) -> Settings:
    return msgspec.structs.replace(settings, redis=msgspec.structs.replace(settings.redis, url=url))


def _short(path: Path) -> str:
    """A path as seen from here, where that is shorter."""
    here = os.path.relpath(path)
    return here if len(here) < len(str(path)) else str(path)


def say(text: str) -> None:
    """One message to the terminal, at once. A terminal that is gone is no reason to die."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
