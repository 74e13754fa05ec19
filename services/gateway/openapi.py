"""The API's routes and their OpenAPI document, from one table. What a request may hold, the endpoints' own readers say
(`field_schema`); what an answer holds stands in `answer_schemas`, and tests compare it with answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway import responses
from services.gateway.answer_schemas import ANSWERS, ERROR
from services.gateway.endpoints import Endpoint
from services.gateway.field_schema import Read, request_schema
from services.gateway.fields import Fields
from services.gateway.params import REFUSED, check_model
from services.gateway.responses import ResponsesEndpoint
from services.gateway.small_endpoints import SmallEndpoints
from shared.version import VERSION

_REFUSALS = {
    400: "A field is wrong, or not supported; `param` names it",
    401: "No API key, or a wrong one",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "The queue is full, or a limit of the key is reached",
    500: "A fault of the server",
    503: "Nobody can serve the request now",
}
_FOR_GET = (401, 404, 429, 500, 503)


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One line of the API."""

    method: str
    path: str
    endpoint: Any  # as Starlette's Route takes it
    summary: str
    answer: str = ""  # a key of `ANSWERS`; "" = it only refuses
    reads: Sequence[Read] = ()  # the readers of a request's body
    refused: Mapping[str, Sequence[Any]] | None = None
    streams: bool = False

    def operation(self) -> dict[str, Any]:
        """Its OpenAPI operation."""
        refusals = [s for s in _REFUSALS if self.reads or s in _FOR_GET]
        answers: dict[str, Any] = {str(status): _answer(_REFUSALS[status], {"$ref": _ERROR}) for status in refusals}
        if self.answer:
            answers["200"] = _answer("The answer", {"$ref": f"#/components/schemas/{self.answer}"})
            if self.streams:
                events = {"schema": {"description": "Server-sent events, with `stream: true`"}}
                answers["200"]["content"]["text/event-stream"] = events
        out: dict[str, Any] = {"summary": self.summary, "responses": dict(sorted(answers.items()))}
        if self.reads:
            body = {"required": True, "content": {"application/json": {"schema": self.request_schema()}}}
            out["requestBody"] = body
        if "{" in self.path:
            name = self.path.partition("{")[2].partition(":")[0]
            out["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
        return out

    def request_schema(self) -> dict[str, Any]:
        """What the readers take."""
        return request_schema(self.reads, self.refused)


_ERROR = "#/components/schemas/Error"


def api_routes(
    completions: Endpoint, chat: Endpoint, answers: ResponsesEndpoint, small: SmallEndpoints
) -> list[ApiRoute]:
    """All of the API."""

    def check(fields: Fields) -> None:
        check_model(fields, "")

    def tokenize(fields: Fields) -> None:
        fields.boolean("return_token_strs")
        small.read_tokenize(fields)

    return [
        ApiRoute("GET", "/v1/models", small.models, "The models served", "ModelList"),
        ApiRoute("GET", "/v1/models/{model:path}", small.model, "One model", "Model"),
        ApiRoute(
            *("POST", "/v1/completions", completions, "Continue a text", "Completion"),
            reads=[completions.read_all],
            refused=REFUSED,
            streams=True,
        ),
        ApiRoute(
            *("POST", "/v1/chat/completions", chat, "Answer a chat", "ChatCompletion"),
            reads=[chat.read_all],
            refused=REFUSED,
            streams=True,
        ),
        ApiRoute(
            *("POST", "/v1/responses", answers, "Answer, without keeping anything", "Response"),
            reads=[answers.read_all],
            refused=responses.REFUSED,
            streams=True,
        ),
        ApiRoute("POST", "/v1/embeddings", small.embeddings, "Refused: the model makes no embeddings"),
        ApiRoute("POST", "/tokenize", small.tokenize, "Token ids of a text", "Tokens", [check, tokenize]),
        ApiRoute("POST", "/detokenize", small.detokenize, "Text of token ids", "Text", [check, small.read_detokenize]),
        ApiRoute("GET", "/version", small.version, "The server's version", "Version"),
    ]


def document(table: Sequence[ApiRoute]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for route in table:
        paths.setdefault(route.path.replace(":path}", "}"), {})[route.method.lower()] = route.operation()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**ANSWERS, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def openapi_route(table: Sequence[ApiRoute]) -> Route:
    """`GET /openapi.json`."""
    body = msgspec.json.encode(document(table))

    async def openapi(_request: Request) -> Response:
        return Response(body, media_type="application/json")

    return Route("/openapi.json", openapi, methods=["GET"])


def _answer(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"x-request-id": {"schema": {"type": "string"}, "description": "The client's, or a new one"}}
    return {"description": text, "headers": headers, "content": {"application/json": {"schema": schema}}}
