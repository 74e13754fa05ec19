"""The gateway's HTTP interface: OpenAI's completions, chat completions and models."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from services.gateway.chat_template import ChatTemplate
from services.gateway.edge import EXPOSED_HEADERS, Edge
from services.gateway.endpoints import ChatEndpoint, CompletionsEndpoint, Parts
from services.gateway.errors import error_response, on_crash, on_http_exception
from services.gateway.gate import Gate
from services.gateway.generation import Services
from services.gateway.grammar_check import GrammarChecker
from services.gateway.params import unknown_model
from services.gateway.ports import NullObserver, Observer, RequestPort
from services.gateway.prepare import Preparer
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
    """
    observer = observer or NullObserver()
    streams = Streams(port, clock, observer)
    template = tokenizer.chat_template
    parts = Parts(
        services=Services(port, streams, tokenizer, clock, observer),
        preparer=Preparer(tokenizer, incarnation, config, offload, randomness),
        template=ChatTemplate(template, tokenizer.template_tokens, clock) if template else None,
        model_name=model_name,
        config=config,
        offload=offload,
        randomness=randomness,
        grammars=grammars,
    )
    endpoints = {"completions": CompletionsEndpoint(parts), "chat": ChatEndpoint(parts)}
    models = _Models(model_name, created=int(clock.wall()))
    app = Starlette(
        routes=[
            Route("/v1/models", models.list, methods=["GET"]),
            Route("/v1/models/{model:path}", models.one, methods=["GET"]),
            Route("/v1/completions", endpoints["completions"], methods=["POST"]),
            Route("/v1/chat/completions", endpoints["chat"], methods=["POST"]),
            *extra_routes,
        ],
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


class _Models:
    def __init__(self, name: str, created: int) -> None:
        self._name = name
        self._model = {"id": name, "object": "model", "created": created, "owned_by": "baton"}

    async def list(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model]})

    async def one(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in (self._name, "default"):
            return error_response(unknown_model(name))
        return _json(self._model)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
