"""Chaos on real processes: `python -m tests.faults.chaos --requests 500 --seed 1`.

Two prefill and two decode workers, clients of every kind, and every few seconds a SIGKILL of somebody, Redis and the
gateway included. In the end every client has its answer, each token is the oracle's, and nothing is left behind.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import redis

from shared.keys import Keys
from shared.model_path import resolve
from tests.faults.census import leftovers, num_workers
from tests.faults.clients import Clients, Findings, GatewayWatch, Judge
from tests.faults.plan import REDIS, ChaosPlan
from tests.flow.stack import Stack
from tests.models import make_tiny_llama
from tests.oracle.oracle import Oracle, load_oracle

LEASES = {"lease__heartbeat_s": 0.5, "lease__lease_s": 4.0, "gateway__submission_lease_s": 2.0}
EVENTS = (
    *("request.lost", "worker.dead", "gateway.dead", "request.readmitted", "seq.fetch_failed", "seq.landed"),
    *("queue.claimed", "submission.restarts", "outbox.stale", "gap", "engine.step_failed", "process.failed"),
    *("process.crashed", "scheduler.leads", "index.resend"),
)
WATCH_S = 0.2


@dataclass(slots=True)
class Report:
    """A run's figures."""

    plan: ChaosPlan
    findings: Findings
    kills: Counter[str] = field(default_factory=Counter)
    freezes: Counter[str] = field(default_factory=Counter)
    own_deaths: Counter[str] = field(default_factory=Counter)  # processes that ended without being killed
    events: Counter[str] = field(default_factory=Counter)  # of all logs
    errors: list[str] = field(default_factory=list)  # logged by the services
    left: list[str] = field(default_factory=list)
    traffic_s: float = 0.0
    rest_s: float = 0.0  # from the last answer until all was back at its start

    @property
    def faults(self) -> list[str]:
        return self.findings.faults + self.left + [f"crashed: {line}" for line in self.errors]

    def text(self) -> str:
        f = self.findings
        lines = {
            "seed": self.plan.seed,
            "answered": f"{f.answered.total()} of {self.plan.num_requests} {dict(f.answered)}",
            "tokens": f"{f.tokens}, all the oracle's" if not f.faults else f.tokens,
            "kills": f"{self.kills.total()} {dict(self.kills)}",
            "freezes": f"{self.freezes.total()} {dict(self.freezes)}",
            "ended by themselves": dict(self.own_deaths),
            "replies broken by their gateway's death and asked again": f.broken,
            "refusals, asked again": dict(f.refused),
            "events": dict(self.events),
            "traffic": f"{self.traffic_s:.1f} s",
            "all back at its start after": f"{self.rest_s:.1f} s",
            "faults": self.faults or "none",
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items())


class Chaos:
    """One run over a stack that is ready."""

    def __init__(self, stack: Stack, plan: ChaosPlan, judge: Judge) -> None:
        self._stack, self._plan = stack, plan
        self._keys = Keys(stack.settings.redis.cell)
        self._watch = GatewayWatch()
        self._clients = Clients(stack.url, stack.redis.url, self._keys, judge, self._watch)
        self._away: set[str] = set()
        self.report = Report(plan, self._clients.findings)

    async def run(self) -> Report:
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._strike, began)
            tasks.start_soon(self._keep_alive)
            async with anyio.create_task_group() as clients:
                for ask in self._plan.asks():
                    await anyio.sleep(max(0.0, began + ask.at_s - time.monotonic()))
                    clients.start_soon(self._clients.ask, ask)
            await self._clients.close()
            self.report.traffic_s = time.monotonic() - began
            tasks.cancel_scope.cancel()
        await anyio.to_thread.run_sync(self._settle)
        self._read_logs()
        return self.report

    async def _strike(self, began: float) -> None:
        for blow in self._plan.blows(self._stack.services):
            await anyio.sleep(max(0.0, began + blow.at_s - time.monotonic()))
            if blow.victim != REDIS and not self._stack.is_running(blow.victim):
                continue  # it ended by itself just now
            if blow.freezes:
                await self._freeze(blow.victim, blow.away_s)
                continue
            self.report.kills[blow.victim] += 1
            self._away.add(blow.victim)
            if blow.victim == "gateway":
                self._watch.died()
            with anyio.CancelScope(shield=True):  # nobody is left dead when the traffic ends
                await self._kill_and_start(blow.victim, blow.away_s)
            self._away.discard(blow.victim)

    async def _freeze(self, victim: str, seconds: float) -> None:
        """It wakes up fenced, and may find that it was buried."""
        self.report.freezes[victim] += 1
        self._stack.signal(victim, signal.SIGSTOP)
        with anyio.CancelScope(shield=True):
            await anyio.sleep(seconds)
            self._stack.signal(victim, signal.SIGCONT)

    async def _kill_and_start(self, victim: str, away_s: float) -> None:
        server = self._stack.redis
        kill = server.kill if victim == REDIS else lambda: self._stack.kill(victim)
        start = server.start if victim == REDIS else lambda: self._stack.start(victim)
        await anyio.to_thread.run_sync(kill)
        await anyio.sleep(away_s)
        if victim == REDIS and self._plan.wipe:
            server.forget()
        await anyio.to_thread.run_sync(start)

    async def _keep_alive(self) -> None:
        """As a supervisor does: who ends by itself (a worker that was buried) is started again."""
        while True:
            await anyio.sleep(WATCH_S)
            for name in self._stack.services:
                if name not in self._away and not self._stack.is_running(name):
                    self.report.own_deaths[name] += 1
                    if name == "gateway":
                        self._watch.died()
                    self._stack.start(name)
            num_deaths = self._watch.num_deaths
            if "gateway" not in self._away and await anyio.to_thread.run_sync(self._stack.is_ready, "gateway"):
                self._watch.is_back(num_deaths)

    def _settle(self) -> None:
        """Everybody back, then nothing left of all that work."""
        began = time.monotonic()
        self._stack.wait_until(self._all_ready, "everybody ready", 180.0)
        workers = sum(name.startswith(("prefill", "decode")) for name in self._stack.services)
        with redis.Redis.from_url(self._stack.redis.url) as client:

            def at_rest() -> bool:
                self.report.left = leftovers(client, self._keys)
                self._all_ready()
                return not self.report.left and num_workers(client, self._keys) == workers

            try:
                self._stack.wait_until(at_rest, "nothing left in Redis", 120.0)
                self._stack.wait_idle(60.0)
            except AssertionError as exc:
                self.report.left.append(str(exc).splitlines()[0])
        self.report.rest_s = time.monotonic() - began

    def _all_ready(self) -> bool:
        """Starts whoever is not there: one that was frozen may find only now that it was buried."""
        for name in self._stack.services:
            if not self._stack.is_running(name):
                self.report.own_deaths[name] += 1
                self._stack.start(name)
        return all(self._stack.is_ready(name) for name in self._stack.services)

    def _read_logs(self) -> None:
        for path in self._stack.logs.iterdir():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                name = event.get("event", "") if isinstance(event, dict) else ""
                if name in EVENTS:
                    self.report.events[name] += 1
                if name in ("process.crashed", "engine.step_failed", "bad event", "request crashed"):
                    self.report.errors.append(f"{path.stem}: {line[-1500:]}")


def run(plan: ChaosPlan, model: Path, oracle: Oracle, **settings: Any) -> Report:
    """A stack of its own, for one plan."""
    judge = Judge(oracle, plan.asks())
    with Stack(prefill=2, decode=2, model__path=model, **{**LEASES, **settings}) as stack:
        report = anyio.run(Chaos(stack, plan, judge).run)
        if report.faults:
            print(f"logs: {stack.logs}", file=sys.stderr)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120.0, help="over which they arrive")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--period", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--freeze", action="store_true", help="some are stopped for longer than the lease, not killed")
    parser.add_argument("--wipe", action="store_true", help="Redis comes back empty")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--model", choices=("tiny", "default"), default="tiny")
    args = parser.parse_args()
    plan = ChaosPlan(args.seed, args.requests, args.seconds, args.period, 2, args.max_tokens, args.wipe, args.freeze)
    if args.model == "default":
        path, blocks = resolve(""), 0
    else:
        path, blocks = make_tiny_llama(Path(tempfile.mkdtemp(prefix="baton-tiny-")) / "tiny"), 400
    report = run(plan, path, load_oracle(path), engine__num_blocks=blocks)
    print(report.text())
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
