"""A gateway that serves submissions, over a scripted model and a real Redis, with time in the test's hands."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from services.gateway.queue_ingress import QueueIngress
from services.gateway.queue_job import JobParts, QueueCounts
from shared.clock import SystemClock
from shared.config import GatewayConfig
from shared.ids import Incarnation
from shared.keys import Keys
from shared.leases import AdmitAnswer
from shared.messages import GenerateRequest
from shared.randomness import SeededRandomness
from shared.redis_link import RedisLink
from shared.submissions import Submissions
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.fakes import FakePort

KEYS = Keys("job-test")
TEXT = "Hello 🦜 there, END of it"
CONFIG = GatewayConfig(max_submissions=3, submission_lease_s=10.0, max_body_bytes=1 << 20)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
COMPLETION = {"prompt": "hi", "max_tokens": 20}


@dataclass
class PortAdmitter:
    """Admission by the fake port, in the place of the leases."""

    port: FakePort
    given: list[tuple[int, list[list[int]]]] = field(default_factory=list)  # epoch and outputs of each

    async def admit(
        self, request: GenerateRequest, max_queued: int, epoch: int = 1, outputs: Sequence[Sequence[int]] = ()
    ) -> AdmitAnswer:
        self.given.append((epoch, [list(tokens) for tokens in outputs]))
        return await self.port.admit(request)


@dataclass
class Queue:
    """A gateway's ingress, its Redis, and time in the test's hands."""

    gateway: Gateway
    link: RedisLink
    submissions: Submissions
    ingress: QueueIngress

    async def submit(self, name: str, body: object, **fields: Any) -> str:
        text = body if isinstance(body, str) else json.dumps(body)
        entry = await self.link.client.xadd(KEYS.submit(), {"id": name, "request": text, **fields})
        return entry.decode()

    async def result(self, name: str) -> tuple[list[dict[str, str]], dict[str, str]]:
        """(parts, end), once it has ended."""
        with anyio.fail_after(20):
            while True:
                found = await self.link.client.xrange(KEYS.result(name))
                entries = [{k.decode(): v.decode() for k, v in values.items()} for _, values in found]
                if entries and "status" in entries[-1]:
                    return entries[:-1], entries[-1]
                await anyio.sleep(0.01)

    async def until(self, look: Callable[[], Any]) -> None:
        async def ask() -> Any:
            return look()

        await self.until_redis(ask)

    async def until_redis(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """What `ask` gives, once it gives something."""
        with anyio.fail_after(20):
            while True:
                if found := await ask():
                    return found
                await anyio.sleep(0.005)

    @asynccontextmanager
    async def running(self, ticking: bool = True) -> AsyncIterator[None]:
        """Ingress and streams run, and with `ticking` the manual clock too, a second in 10 ms."""

        async def tick() -> None:
            while True:
                self.gateway.clock.advance(0.1)
                await anyio.sleep(0.001)

        async with self.gateway.app.router.lifespan_context(self.gateway.app), anyio.create_task_group() as tasks:
            tasks.start_soon(self.ingress.run)
            if ticking:
                tasks.start_soon(tick)
            yield
            tasks.cancel_scope.cancel()


def joined(parts: list[dict[str, str]]) -> tuple[list[int], str]:
    """(tokens, text) of the only choice, checked to be without hole or repeat."""
    tokens: list[int] = []
    for part in parts:
        assert int(part["offset"]) == len(tokens)
        tokens += json.loads(part["tokens"])
    return tokens, "".join(part["text"] for part in parts)


def other_gateway(link: RedisLink) -> Submissions:
    """The way to the queue of a gateway beside the one under test."""
    return Submissions(link, KEYS, SystemClock(), SeededRandomness(4), Incarnation("other"), 60.0)


def make_queue(gateway: Gateway, link: RedisLink) -> Queue:
    submissions = Submissions(link, KEYS, SystemClock(), SeededRandomness(3), Incarnation("gw"), 60.0)
    state = gateway.app.state
    parts = JobParts(state.parts, state.endpoints, submissions, PortAdmitter(gateway.port), QueueCounts())
    return Queue(gateway, link, submissions, QueueIngress(submissions, parts, gateway.clock, CONFIG))
