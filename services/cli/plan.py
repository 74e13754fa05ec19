"""From settings to the list of processes. Pure but for the free ports that it is given."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.cli.placement import cores_text, split_cores
from services.cli.probe import REDIS_SOCKET
from services.cli.supervisor import ServiceSpec
from shared.config import DRAIN_S, PREFIX, Settings, to_environ

REDIS_STAGE, SERVICE_STAGE = 0, 1
# A drain needs, from first to last: the gateway to see its streams end, the scheduler to place what is
# preempted, the workers to finish, Redis to carry it all.
STOP_GATEWAY, STOP_SCHEDULER, STOP_WORKERS, STOP_INDEX, STOP_REDIS = range(5)
WORK_DRAIN_S = DRAIN_S + 5.0  # gateway and workers, which have something to finish
OTHER_DRAIN_S = 8.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class StackPlan:
    settings: Settings
    num_prefill: int
    num_decode: int
    cores: tuple[int, ...]  # of the machine, for the workers
    ports: tuple[int, ...]  # free ones, `num_ports` of them

    @property
    def workers(self) -> list[tuple[str, str]]:
        """(room, name); prefill first, since a remainder of cores helps it most."""
        counts = (("prefill", self.num_prefill), ("decode", self.num_decode))
        return [(room, f"{room}-{i}") for room, count in counts for i in range(count)]

    @property
    def url(self) -> str:
        """Of the API."""
        gateway = self.settings.gateway
        url = http_url(gateway.host, gateway.port)
        return url.replace("http:", "https:", 1) if gateway.tls_cert else url


def num_ports(num_prefill: int, num_decode: int) -> int:
    """Private ports that a stack needs: gateway, scheduler, index and one per worker, for health and metrics."""
    return 3 + num_prefill + num_decode


def http_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def redis_spec(argv: Sequence[str], socket: Path) -> ServiceSpec:
    return ServiceSpec(
        name="redis",
        argv=tuple(argv),
        ready=f"{REDIS_SOCKET}{socket}",
        stage=REDIS_STAGE,
        stop_order=STOP_REDIS,
        drain_s=OTHER_DRAIN_S,
    )


def service_specs(plan: StackPlan) -> list[ServiceSpec]:
    """All services but Redis."""
    assert len(plan.ports) == num_ports(plan.num_prefill, plan.num_decode)
    scheduler_port, index_port, gateway_port, *worker_ports = plan.ports
    s = plan.settings
    gateway_port = s.gateway.internal_port or gateway_port
    s = msgspec.structs.replace(
        s,
        scheduler=msgspec.structs.replace(s.scheduler, port=scheduler_port),
        index=msgspec.structs.replace(s.index, port=index_port),
        gateway=msgspec.structs.replace(s.gateway, internal_port=gateway_port),
    )
    specs = [
        _spec("prefix_index", "prefix-index", s, http_url("127.0.0.1", index_port), STOP_INDEX),
        _spec("scheduler", "scheduler", s, http_url("127.0.0.1", scheduler_port), STOP_SCHEDULER),
        _spec("gateway", "gateway", s, http_url(s.gateway.internal_host, gateway_port), STOP_GATEWAY, WORK_DRAIN_S),
    ]
    shares = split_cores(plan.cores, len(plan.workers))
    for (room, name), cores, port in zip(plan.workers, shares, worker_ports, strict=True):
        specs.append(_worker_spec(room, name, cores, port, s, 1 / len(shares)))
    return specs


def _worker_spec(
    room: str, name: str, cores: tuple[int, ...], port: int, s: Settings, memory_share: float
) -> ServiceSpec:
    worker = msgspec.structs.replace(
        s.worker, name=name, health_port=port, cores=cores_text(cores), num_threads=len(cores)
    )
    engine = msgspec.structs.replace(s.engine, memory_share=memory_share)
    s = msgspec.structs.replace(s, worker=worker, engine=engine)
    return _spec(room, name, s, http_url("127.0.0.1", port), STOP_WORKERS, WORK_DRAIN_S, cores)


def _spec(
    room: str,
    name: str,
    settings: Settings,
    url: str,
    stop_order: int,
    drain_s: float = OTHER_DRAIN_S,
    cores: tuple[int, ...] = (),
) -> ServiceSpec:
    threads = dict.fromkeys(THREAD_VARIABLES, str(max(1, len(cores))))
    return ServiceSpec(
        name=name,
        argv=(sys.executable, "-m", f"services.{room}"),
        ready=f"{url}/ready",
        env=to_environ(settings) | threads,
        cores=cores,
        stage=SERVICE_STAGE,
        stop_order=stop_order,
        drain_s=drain_s,
    )


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What every child inherits: everything but Baton's own variables, which its settings replace."""
    inherited = {k: v for k, v in environ.items() if not k.startswith(PREFIX)}
    return inherited | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
