"""The real tokenizer, the app over a fake queue, and clients of it."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from services.gateway.app import build_app
from services.gateway.grammar_check import ProcessGrammarChecker
from shared.clock import ManualClock, SystemClock
from shared.config import GatewayConfig, RedisConfig
from shared.http_protocol import HttpProtocol
from shared.ids import Incarnation
from shared.model_path import resolve
from shared.randomness import SeededRandomness
from shared.redis_link import RedisLink
from shared.tokenizer import Tokenizer, load_tokenizer
from tests.unit.gateway.fakes import CountingOffload, FakePort, Recorder
from tests.unit.gateway.scripts_world import Queue


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(""))


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[Queue]:
    """The scripts' side of submissions; tests of jobs and of the ingress have one of their own."""
    link = RedisLink(RedisConfig(url=redis_url), SystemClock())
    yield Queue(link)
    await link.close()


@dataclass
class Gateway:
    """An app with everything around it in the test's hands."""

    app: Starlette
    port: FakePort
    clock: ManualClock
    observer: Recorder
    offload: CountingOffload
    tokenizer: Tokenizer

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client without a network; a response arrives whole."""
        async with self.app.router.lifespan_context(self.app):
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                yield client

    @asynccontextmanager
    async def server(self, send_buffer: int | None = None) -> AsyncIterator[int]:
        """A real HTTP server on a free port, its connections with so small a buffer in the kernel."""
        config = uvicorn.Config(self.app, http=HttpProtocol, port=0, log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server._serve)
            while not server.started:
                await anyio.lowlevel.checkpoint()
            listening = server.servers[0].sockets[0]
            if send_buffer is not None:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # accepted sockets inherit it
            yield listening.getsockname()[1]
            server.should_exit = True

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def gateway(tokenizer: Tokenizer, anyio_backend: str) -> Gateway:
    return make_gateway(tokenizer)


def make_gateway(tokenizer: Tokenizer, **settings: Any) -> Gateway:
    """One with these settings of `gateway`."""
    port, clock, observer, offload = FakePort(), ManualClock(1000.0), Recorder(), CountingOffload()
    app = build_app(
        port=port,
        tokenizer=tokenizer,
        model_name="smol",
        incarnation=Incarnation("gw"),
        config=GatewayConfig(max_body_bytes=1 << 20, **settings),
        clock=clock,
        randomness=SeededRandomness(7),
        offload=offload,
        grammars=ProcessGrammarChecker(resolve(""), timeout_s=5, max_bytes=1 << 16),
        observer=observer,
    )
    return Gateway(app, port, clock, observer, offload, tokenizer)


def client_of(port: int) -> openai.AsyncOpenAI:
    """OpenAI's own client of a gateway's server, which never tries again."""
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
