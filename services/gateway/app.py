"""The gateway's HTTP interface: OpenAI's, and what vLLM's server has besides."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from services.gateway.body import BodyBudget
from services.gateway.chat import ChatReader
from services.gateway.chat_template import load_template
from services.gateway.edge import EXPOSED_HEADERS, Edge
from services.gateway.endpoints import ChatEndpoint, CompletionsEndpoint, Parts
from services.gateway.errors import on_crash, on_http_exception
from services.gateway.gate import Gate
from services.gateway.generation import Services
from services.gateway.grammar_check import GrammarChecker
from services.gateway.openapi import api_routes, openapi_route
from services.gateway.ports import NullObserver, Observer, RequestPort
from services.gateway.prepare import Preparer
from services.gateway.responses import ResponsesEndpoint
from services.gateway.small_endpoints import SmallEndpoints
from services.gateway.streams import Streams
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.ids import Incarnation
from shared.offload import Offload
from shared.randomness import Randomness
from shared.tokenizer import Tokenizer


def build_app(
    *,
    port: RequestPort,
    tokenizer: Tokenizer,
    model_name: str,
    incarnation: Incarnation,
    config: GatewayConfig,
    clock: Clock,
    randomness: Randomness,
    offload: Offload,
    grammars: GrammarChecker,
    observer: Observer | None = None,
    gate: Gate | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The ASGI application. Its lifespan runs the drain of the token stream; `app.state.streams` holds the
    open requests (`len` of it is their number), `app.state.parts` and `app.state.endpoints` what another ingress needs.

    :param gate: who may ask; None: anyone.
    :param model_name: what `/v1/models` lists; `default` is always understood as well.
    :raises ModelError: the model's chat template is not valid.
    :raises ConfigError: the configured one cannot be read.
    """
    observer = observer or NullObserver()
    streams = Streams(port, clock, observer)
    template = load_template(tokenizer, config.chat_template, clock)
    parts = Parts(
        services=Services(port, streams, tokenizer, clock, observer),
        preparer=Preparer(tokenizer, incarnation, config, offload, randomness),
        chats=ChatReader(template, tokenizer, config),
        model_name=model_name,
        config=config,
        offload=offload,
        randomness=randomness,
        grammars=grammars,
        bodies=BodyBudget(config.max_open_body_bytes),
    )
    endpoints = {"completions": CompletionsEndpoint(parts), "chat": ChatEndpoint(parts)}
    small = SmallEndpoints(parts)
    table = api_routes(endpoints["completions"], endpoints["chat"], ResponsesEndpoint(parts), small)
    app = Starlette(
        routes=[*(Route(r.path, r.endpoint, methods=[r.method]) for r in table), openapi_route(table), *extra_routes],
        middleware=[*_cors(config), Middleware(Edge, gate=gate, randomness=randomness, observer=observer)],
        exception_handlers={HTTPException: on_http_exception, Exception: on_crash},
        lifespan=_drain(streams, grammars, gate),
    )
    app.state.streams, app.state.parts, app.state.endpoints = streams, parts, endpoints
    return app


def _cors(config: GatewayConfig) -> list[Middleware]:
    """Outermost, since a browser asks first without a key, and must be able to read a refusal."""
    if not config.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
            max_age=600,
        )
    ]


def _drain(streams: Streams, grammars: GrammarChecker, gate: Gate | None) -> Any:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(streams.run)
            if gate is not None:
                tasks.start_soon(gate.run)
            try:
                yield
            finally:
                await grammars.aclose()
            tasks.cancel_scope.cancel()

    return lifespan
