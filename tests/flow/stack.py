"""All processes of a cell on this machine, for tests: a private Redis, the services, and ways to hurt them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import redis

from services.cli.plan import StackPlan, child_environ, num_ports, service_specs
from services.cli.supervisor import ServiceSpec
from shared.config import load
from shared.keys import Keys
from shared.leases import unpack_tokens
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
READY_S = 120.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Stack:
    """`with Stack(prefill=1, decode=1) as stack:` gives a ready cell. Settings as `section__field=value`."""

    def __init__(self, *, prefill: int = 1, decode: int = 1, **settings: Any) -> None:
        self.redis = RedisServer()
        self.logs = Path(tempfile.mkdtemp(prefix="baton-flow-"))
        port, *ports = free_ports(1 + num_ports(prefill, decode))
        environ = {
            "BATON_REDIS_URL": self.redis.url,
            "BATON_GATEWAY_PORT": str(port),
            "BATON_ENGINE_MEMORY_FRACTION": "0.25",
            "BATON_ENGINE_PREFAULT_BYTES": "0",
            "BATON_LOG_LEVEL": "info",
            "BATON_MODEL_DTYPE": "float32",  # the exact path: answers are compared with the oracle
        }
        environ |= {f"BATON_{name.replace('__', '_').upper()}": str(value) for name, value in settings.items()}
        # One core per worker at most: two threads of one worker on busy cores wait for each other at every op.
        cores = tuple(sorted(os.sched_getaffinity(0)))[: prefill + decode]
        plan = StackPlan(load(environ=environ), prefill, decode, cores, tuple(ports))
        self.settings = plan.settings
        self.url = plan.url
        self._specs: dict[str, ServiceSpec] = {spec.name: spec for spec in service_specs(plan)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # One for all looks: each new one reads the machine's certificates anew.
        self._http = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    # --- life ---

    def __enter__(self) -> "Stack":
        self.redis.start()
        try:
            for name in self._specs:
                self.start(name)
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self.tail(), file=sys.stderr)
        self.close()

    def start(self, name: str) -> None:
        spec = self._specs[name]
        environ = child_environ(os.environ) | dict(spec.env or {}) | {"PYTHONPATH": str(ROOT)}
        with (self.logs / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(spec.argv, env=environ, cwd=ROOT, stdout=log, stderr=log)

    def wait_ready(self, *names: str) -> None:
        """Until these services (all, if none is named) answer /ready with 200."""
        deadline = time.monotonic() + READY_S
        for name in names or self._specs:
            while not self.is_ready(name):
                code = self._processes[name].poll()
                assert code is None, f"{name} ended with {code}\n{self.tail()}"
                assert time.monotonic() < deadline, f"{name} is not ready\n{self.tail()}"
                time.sleep(0.05)

    @property
    def services(self) -> list[str]:
        """Names of all but Redis."""
        return list(self._specs)

    def is_running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def is_ready(self, name: str) -> bool:
        """Whether it answers /ready with 200 now."""
        with suppress(httpx.HTTPError):
            return self._http.get(self._specs[name].ready, timeout=5).status_code == 200
        return False

    def signal(self, name: str, signum: int) -> None:
        self._processes[name].send_signal(signum)

    def kill(self, name: str) -> None:
        """SIGKILL, and the corpse is collected."""
        self.signal(name, signal.SIGKILL)
        self._processes[name].wait(10)

    def stop(self, name: str, timeout_s: float = 40.0) -> int:
        """SIGTERM; the exit code after the drain."""
        self.signal(name, signal.SIGTERM)
        return self.wait(name, timeout_s)

    def wait(self, name: str, timeout_s: float = 40.0) -> int:
        """The exit code, once it has ended."""
        return self._processes[name].wait(timeout_s)

    def close(self) -> None:
        self._http.close()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(10)
        self.redis.close()

    # --- looking in ---

    def metrics(self, name: str) -> dict[str, float]:
        """Values of a service by metric name; `baton_` and labels left out, labelled children added up."""
        text = self._http.get(self._specs[name].ready.removesuffix("/ready") + "/metrics", timeout=5).text
        values: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                short = key.split("{")[0].removeprefix("baton_")
                values[short] = values.get(short, 0.0) + float(value)
        return values

    def total(self, role: str, metric: str) -> float:
        """A worker metric added up over the live workers of a role."""
        names = [n for n in self._specs if n.startswith(f"{role}-") and self._processes[n].poll() is None]
        return sum(self.metrics(name)[f"{role}_{metric}"] for name in names)

    def token_log(self, response_id: str, choice: int = 0) -> tuple[int, ...]:
        """Tokens that were emitted for a response, as Redis keeps them for a minute after its end."""
        keys = Keys(self.settings.redis.cell)
        with redis.Redis.from_url(self.redis.url) as client:
            return unpack_tokens(client.get(keys.log(response_id, choice)) or b"")

    def redis_call(self, *command: Any) -> Any:
        with redis.Redis.from_url(self.redis.url) as client:
            return client.execute_command(*command)

    def wait_until(self, look: Any, what: str, timeout_s: float = 15.0) -> None:
        """Until `look()` is true."""
        deadline = time.monotonic() + timeout_s
        while not look():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.tail()}"
            time.sleep(0.02)

    def wait_idle(self, timeout_s: float = 15.0) -> None:
        """Until every pool is back at its start and no credit is taken: what each test must leave behind."""

        def idle() -> bool:
            for role in ("prefill", "decode"):
                for name in (n for n in self._specs if n.startswith(role) and self._processes[n].poll() is None):
                    values = self.metrics(name)
                    if values[f"{role}_active"] or (
                        values[f"{role}_engine_blocks_free"] != values[f"{role}_engine_blocks_total"]
                    ):
                        return False
            keys = Keys(self.settings.redis.cell)
            with redis.Redis.from_url(self.redis.url) as client:
                taken = [int(client.hget(k, "taken") or 0) for k in client.keys(f"{{{keys.cell}}}:worker:*")]
                held = client.keys(f"{{{keys.cell}}}:held:*")
                waiting = client.zcard(keys.leases()) + client.zcard(keys.queued())
                return not any(taken) and not held and not waiting

        self.wait_until(idle, "all blocks free, no credit taken, nothing held, no lease left", timeout_s)

    def tail(self, lines: int = 25) -> str:
        """The end of every log."""
        parts = [
            f"--- {p.stem}\n" + "\n".join(p.read_text().splitlines()[-lines:]) for p in sorted(self.logs.iterdir())
        ]
        return "\n".join(parts)
