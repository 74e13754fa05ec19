"""The endpoints that generate nothing: models, tokens and their text, the version, and what this server is not."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.body import OFFLOAD_BYTES, ClientDisconnect, HeldBody, read_json
from services.gateway.chat import read_options
from services.gateway.endpoints import Parts
from services.gateway.errors import ApiError, bad_field, error_response
from services.gateway.fields import Fields, checked_text
from services.gateway.messages import MESSAGES_SCHEMA
from services.gateway.params import check_model, refuse_unsupported, unknown_model
from services.gateway.prepare import live_limits
from services.gateway.tools import read_tools
from shared.version import VERSION


class SmallEndpoints:
    """Each method answers one route."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tokenizer = parts.services.tokenizer
        created = int(parts.services.clock.wall())
        self._model = {"id": parts.model_name, "object": "model", "created": created, "owned_by": "baton"}

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in (self._parts.model_name, "default"):
            return error_response(unknown_model(name))
        return _json(self._model)

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def embeddings(self, request: Request) -> Response:
        message = f"The model {self._parts.model_name!r} generates text; it cannot make embeddings."
        return error_response(ApiError(404, message, param="model", code="unsupported"))

    async def tokenize(self, request: Request) -> Response:
        """As vLLM's: token ids of a prompt, or of messages as the model's template puts them."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """As vLLM's: text of token ids, special tokens among them."""
        return await self._answer(request, self._detokenize)

    async def _answer(self, request: Request, answer: Callable[[Fields], Awaitable[dict[str, Any]]]) -> Response:
        with self._parts.bodies.hold() as held:
            return await self._answer_held(request, answer, held)

    async def _answer_held(
        self, request: Request, answer: Callable[[Fields], Awaitable[dict[str, Any]]], held: HeldBody
    ) -> Response:
        parts, config = self._parts, self._parts.config
        try:
            raw = await read_json(
                request, config.max_body_bytes, parts.offload, parts.services.clock, config.body_timeout_s, held
            )
            fields = Fields(raw)
            check_model(fields, parts.model_name)
            return _json(await answer(fields))
        except ApiError as exc:
            parts.services.observer.refused(exc.status, exc.code or "")
            return error_response(exc)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    async def _tokenize(self, fields: Fields) -> dict[str, Any]:
        text, special = self.read_tokenize(fields)
        with_text = fields.boolean("return_token_strs")
        limits = await live_limits(self._parts.services.port)
        param = "messages" if fields.get("prompt") is None else "prompt"
        self._parts.preparer.refuse_hopeless(text, limits, param)
        if len(text) > OFFLOAD_BYTES // 8:
            token_ids, names = await self._parts.offload.run(self._encode, text, special, with_text)
        else:
            token_ids, names = self._encode(text, special, with_text)
        return {
            "count": len(token_ids),
            "max_model_len": limits.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }

    def read_tokenize(self, fields: Fields) -> tuple[str, bool]:
        """(text, whether special tokens are to be put around it).

        :raises ApiError: 400 that names a field.
        """
        refuse_unsupported(fields)
        prompt = fields.get("prompt", {"type": "string"})
        special = fields.get("add_special_tokens", {"type": "boolean"})
        if special is not None and type(special) is not bool:
            raise bad_field("add_special_tokens", "add_special_tokens must be true or false.")
        messages = fields.get("messages", MESSAGES_SCHEMA)
        read_options(fields)  # checked beside a prompt too, where they change nothing
        read_tools(fields)
        if (prompt is None) == (messages is None):
            raise bad_field("messages", "Either prompt or messages must be given.")
        if prompt is not None:
            return checked_text("prompt", prompt), special is not False
        return self._parts.chats.read(fields, None).prompt, special is True

    async def _detokenize(self, fields: Fields) -> dict[str, Any]:
        token_ids = self.read_detokenize(fields)
        text = await self._parts.offload.run(self._text, token_ids)
        return {"prompt": text}

    def read_detokenize(self, fields: Fields) -> list[int]:
        """:raises ApiError: 400 that names `tokens`."""
        last = self._tokenizer.vocab_size - 1
        schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": last}}
        tokens = fields.get("tokens", schema, required=True)
        if not isinstance(tokens, list) or any(type(i) is not int or not 0 <= i <= last for i in tokens):
            raise bad_field("tokens", f"tokens must be a list of token ids between 0 and {last}.")
        return tokens

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _encode(self, text: str, special: bool, with_text: bool) -> tuple[list[int], list[str | None] | None]:
        """Token ids, and their names if they are wanted."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=special)
        return token_ids, [self._tokenizer.backend.id_to_token(i) for i in token_ids] if with_text else None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
