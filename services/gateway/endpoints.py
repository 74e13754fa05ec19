"""The two POST endpoints, as ASGI applications: they watch the connection while they work, so that a gone
client cancels everything at once, streaming or not, tokenising, queued or decoding."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import anyio
import structlog
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from services.gateway.answers import Answer, best, empty_answers
from services.gateway.body import BodyBudget, ClientDisconnect, HeldBody, read_json
from services.gateway.chat import ChatReader, read_options
from services.gateway.chat_wire import ChatWire
from services.gateway.errors import ApiError, bad_field, error_response, internal
from services.gateway.fields import Fields
from services.gateway.gate import Caller, caller_of
from services.gateway.generation import EndpointName, Generation, Services, Usage
from services.gateway.grammar_check import GrammarChecker
from services.gateway.logprobs import LogprobWriter
from services.gateway.messages import read_messages
from services.gateway.params import Params, check_model, read_params
from services.gateway.prepare import Preparer, live_limits
from services.gateway.prompts import Prompt, read_prompts
from services.gateway.structured import GrammarAsk
from services.gateway.tools import read_tools
from services.gateway.wire import CompletionWire, Wire
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.errors import BatonError
from shared.messages import GenerateRequest
from shared.offload import Offload
from shared.randomness import Randomness

log = structlog.get_logger("gateway")

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions."""

CHAT_FIELDS = ("tools", "tool_choice", "chat_template_kwargs", "continue_final_message")
"""Refused with completions, whose answer they would change."""

_JSON_HEADERS = [(b"content-type", b"application/json")]
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the endpoints share."""

    services: Services
    preparer: Preparer
    chats: ChatReader
    model_name: str
    config: GatewayConfig
    offload: Offload
    randomness: Randomness
    grammars: GrammarChecker
    bodies: BodyBudget


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a client asked, checked and ready to be admitted, and how its answer is written."""

    requests: list[GenerateRequest]
    params: Params
    wire: Wire

    @property
    def max_tokens(self) -> int:
        """What all of it may take, prompts and answers."""
        return sum(len(r.token_ids) + r.num_choices * r.sampling.max_tokens for r in self.requests)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The response that is not streamed."""
        return self.wire.whole(best(answers, self.params.n, self.params.best_of), usage)


@dataclass(frozen=True, slots=True)
class _Question:
    """The prompts as the client gave them, and what is to become of them."""

    prompts: Sequence[Prompt]
    param: str  # the field to name if they are too long
    add_special_tokens: bool
    grammar: GrammarAsk | None
    wire: Callable[[str, int, str, bool], Wire]


class Endpoint(ABC):
    """One POST endpoint. Subclasses say how a prompt is read and an answer written."""

    name: ClassVar[EndpointName]
    id_prefix: ClassVar[str]
    is_chat: ClassVar[bool] = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @abstractmethod
    def _question(self, fields: Fields, params: Params) -> "_Question": ...

    @abstractmethod
    def _default_max_tokens(self) -> int: ...

    def read_all(self, fields: Fields) -> None:
        """Ask for every field that this endpoint knows: how `SchemaFields` learns of them.

        :raises ApiError: one is wrong or missing.
        """
        check_model(fields, self._parts.model_name)
        read_params(fields, chat=self.is_chat)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._parts.bodies.hold() as held:
            await self._handle(scope, receive, send, held)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, held: HeldBody) -> None:
        arrived_at = self._parts.services.clock.now()
        reply = _Reply(send, self._parts.services.clock)
        request = Request(scope, receive)
        try:
            raw = await self._read(request, held)
        except ClientDisconnect:
            return
        except ApiError as exc:
            await self._refuse(exc, reply, scope, receive)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
            tasks.start_soon(_cancel_when_stalled, reply, self._parts.config.client_stall_s, tasks.cancel_scope)
            await self._answer(raw, arrived_at, reply, scope, receive)
            tasks.cancel_scope.cancel()

    async def _read(self, request: Request, held: HeldBody) -> dict[str, Any]:
        parts, config = self._parts, self._parts.config
        return await read_json(
            request, config.max_body_bytes, parts.offload, parts.services.clock, config.body_timeout_s, held
        )

    async def _answer(
        self, raw: dict[str, Any], arrived_at: float, reply: "_Reply", scope: Scope, receive: Receive
    ) -> None:
        """Serve the request; whatever goes wrong becomes an error that the client can read."""
        try:
            await self._serve(Fields(raw), arrived_at, reply, caller_of(scope))
        except ApiError as exc:
            await self._refuse(exc, reply, scope, receive)
        except BatonError as exc:
            log.error("request failed", error=str(exc))
            await self._refuse(internal(), reply, scope, receive)
        except Exception:
            log.exception("request crashed")
            await self._refuse(internal(), reply, scope, receive)

    async def _serve(self, fields: Fields, arrived_at: float, reply: "_Reply", caller: Caller) -> None:
        response_id = f"{self.id_prefix}-{self._parts.randomness.token(16)}"
        prepared = await self.prepare(fields, response_id, tenant=caller.tenant)
        await caller.charge(prepared.max_tokens)
        caller.used_tokens = 0  # unless it begins
        params, wire = prepared.params, prepared.wire
        reply.wire = wire
        async with Generation(
            self._parts.services,
            prepared.requests,
            params.shown,
            endpoint=self.name,
            stream=params.stream,
            arrived_at=arrived_at,
        ) as generation:
            try:
                if params.stream:
                    await _stream(generation, wire, params, reply)
                    return
                body = await _whole(generation, prepared)
            finally:
                caller.used_tokens = generation.usage.num_tokens
        await reply.whole(200, _JSON_HEADERS, body)

    async def prepare(
        self, fields: Fields, response_id: str, randomness: Randomness | None = None, tenant: str = ""
    ) -> Prepared:
        """Check and tokenise what a client asked, whichever way it came.

        :param tenant: on whose account, as the server knows it.
        :param randomness: where seeds come from that the client left out; None: anywhere.
        :raises ApiError: 400 or 404, a refusal; 503, nobody could serve it now.
        """
        parts = self._parts
        check_model(fields, parts.model_name)
        params = read_params(fields, chat=self.is_chat)
        limits = await live_limits(parts.services.port)
        preparer = parts.preparer.for_tenant(tenant)
        asked = self._question(fields, params)
        prompts = await preparer.tokens(
            asked.prompts, limits, param=asked.param, add_special_tokens=asked.add_special_tokens
        )
        default = self._default_max_tokens()
        grammar = "" if asked.grammar is None else await parts.grammars.check(asked.grammar)
        requests = preparer.requests(response_id, prompts, params, limits, default, randomness, grammar)
        created, wanted = int(parts.services.clock.wall()), fields.get("prompt_logprobs") not in (None, False)
        wire = asked.wire(response_id, created, parts.model_name, params.include_usage)
        wire.writer = LogprobWriter(
            parts.services.tokenizer,
            is_on=params.wants_logprobs,
            prompts=[r.token_ids for r in requests for _ in range(r.num_choices)] if wanted else (),
        )
        return Prepared(requests, params, wire)

    async def _refuse(self, error: ApiError, reply: "_Reply", scope: Scope, receive: Receive) -> None:
        """An HTTP error, or once the answer has begun an `error` event and the end, without [DONE]."""
        self._parts.services.observer.refused(error.status, error.code or "")
        if reply.started:
            assert reply.wire is not None
            await reply.part(reply.wire.error(error))
            await reply.end()
            return
        response = error_response(error)
        if error.status in (408, 413):
            response.headers["connection"] = "close"  # the rest of the body is not read
        await response(scope, receive, reply.send)


class CompletionsEndpoint(Endpoint):
    name = "completions"
    id_prefix = "cmpl"
    is_chat = False

    def _question(self, fields: Fields, params: Params) -> _Question:
        for name in CHAT_FIELDS:
            if fields.get(name) not in (None, False, [], {}, "none", "auto"):
                raise bad_field(name, f"{name} is for /v1/chat/completions.", "unsupported")
        prompts = read_prompts(fields, self._parts.services.tokenizer.vocab_size)
        special = fields.boolean("add_special_tokens", default=True)
        return _Question(prompts, "prompt", special, params.grammar, CompletionWire)

    def _default_max_tokens(self) -> int:
        return COMPLETION_MAX_TOKENS

    def read_all(self, fields: Fields) -> None:
        super().read_all(fields)
        fields.boolean("add_special_tokens", default=True)
        read_prompts(fields, self._parts.services.tokenizer.vocab_size)


class ChatEndpoint(Endpoint):
    name = "chat"
    id_prefix = "chatcmpl"

    def read_all(self, fields: Fields) -> None:
        super().read_all(fields)
        fields.boolean("add_special_tokens")
        read_options(fields)
        read_tools(fields)
        read_messages(fields)

    def _question(self, fields: Fields, params: Params) -> _Question:
        asked = self._parts.chats.read(fields, params.grammar)
        special = fields.boolean("add_special_tokens")  # BOS is in the template, where there is one
        return _Question([asked.prompt], "messages", special, asked.grammar, partial(ChatWire, shape=asked.shape))

    def _default_max_tokens(self) -> int:
        return self._parts.config.default_max_tokens


_PIECE = 16 << 10
"""Bytes handed to the connection at once."""


class _Reply:
    """The response being sent; knows whether it has begun, and how long the client has not taken any of it."""

    def __init__(self, send: Send, clock: Clock) -> None:
        self._send, self._clock = send, clock
        self.started = False
        self.wire: Wire | None = None  # once the request is understood
        self._blocked_since: float | None = None

    @property
    def blocked_s(self) -> float:
        return 0.0 if self._blocked_since is None else self._clock.now() - self._blocked_since

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    async def send(self, message: Message) -> None:
        self.started = True
        self._blocked_since = self._clock.now()
        await self._send(message)
        self._blocked_since = None

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def part(self, body: bytes) -> None:
        """In pieces, so that a client which takes a long one slowly is seen to take it."""
        for start in range(0, len(body), _PIECE):
            piece = body[start : start + _PIECE]
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


async def _stream(generation: Generation, wire: Wire, params: Params, reply: _Reply) -> None:
    """Server-sent events. The response begins with the first text, so that a request which fails before
    that still gets an honest status."""
    while deltas := await generation.read():
        body = b"" if reply.started else wire.first(generation.num_choices)
        body += b"".join([wire.chunk(delta) for delta in deltas])
        if not reply.started:
            await reply.start(200, _SSE_HEADERS)
        await reply.part(body)
    tail = wire.usage_chunk(generation.usage) if params.include_usage else b""
    await reply.part(tail + wire.done)
    await reply.end()


async def _whole(generation: Generation, prepared: Prepared) -> bytes:
    answers = empty_answers(prepared.requests)
    while deltas := await generation.read():
        for delta in deltas:
            answers[delta.choice].add(delta)
    return prepared.whole(answers, generation.usage)


async def _cancel_when_gone(receive: Receive, work: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


async def _cancel_when_stalled(reply: _Reply, limit_s: float, work: anyio.CancelScope) -> None:
    """A client that reads nothing: the buffers up to it are full, and the last part of the answer does not leave."""
    while reply.blocked_s < limit_s:
        await reply.sleep(limit_s / 4)
    log.warning("client reads nothing", blocked_s=round(reply.blocked_s, 1))
    work.cancel()
