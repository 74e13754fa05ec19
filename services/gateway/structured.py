"""What a client wants its answer to look like: `response_format`, and vLLM's `structured_outputs` and `guided_*`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.errors import ApiError, bad_field
from services.gateway.fields import Fields, checked_text
from services.gateway.nested_json import decode_json
from shared.grammar import GrammarKind

MAX_CHOICES = 4096
_ANY_OBJECT = '{"type":"object"}'
_KINDS: dict[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class GrammarAsk:
    """A grammar as the client wrote it. `field` is named in refusals."""

    field: str
    kind: GrammarKind
    text: str


def read_grammar(fields: Fields) -> GrammarAsk | None:
    """The one grammar that the request asks for; None: any text will do.

    :raises ApiError: 400 that names the field: malformed, or a second grammar beside the first.
    """
    asks = [_response_format(fields), _structured_outputs(fields)]
    asks += [_by_name(fields, f"guided_{name}", name) for name in _KINDS]
    found = [ask for ask in asks if ask is not None]
    if len(found) > 1:
        raise bad_field(found[1].field, f"{found[0].field} and {found[1].field} cannot both be given.")
    for name in ("ignore_eos", "min_tokens"):
        if found and fields.get(name):
            raise bad_field(name, f"{name} cannot be combined with {found[0].field}, which ends the answer.")
    return found[0] if found else None


def schema_text(value: Any, path: str) -> str:
    """A JSON schema, given as an object, as JSON text.

    :raises ApiError: 400, it is neither an object nor true or false.
    """
    if not isinstance(value, dict | bool):
        raise bad_field(path, f"{path} must be a JSON schema: an object.")
    return msgspec.json.encode(value).decode()


def _response_format(fields: Fields) -> GrammarAsk | None:
    form = fields.object("response_format")
    if form is None:
        return None
    kind = form.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarAsk("response_format", "json_schema", _ANY_OBJECT)
    if kind != "json_schema":
        raise bad_field(form.path("type"), f"{form.path('type')} must be one of text, json_object, json_schema.")
    outer = form.object("json_schema")
    if outer is None:
        raise bad_field(form.path("json_schema"), f"{form.path('json_schema')} is missing.")
    outer.boolean("strict")  # it is strict either way
    if (schema := outer.get("schema")) is None:
        raise bad_field(outer.path("schema"), f"{outer.path('schema')} is missing.")
    return GrammarAsk(outer.path("schema"), "json_schema", schema_text(schema, outer.path("schema")))


def _structured_outputs(fields: Fields) -> GrammarAsk | None:
    options = fields.object("structured_outputs")
    if options is None:
        return None
    for name, value in options.raw.items():
        if value is not None and value is not False and name not in (*_KINDS, "json_object"):
            path = options.path(name)
            raise bad_field(path, f"{path} is not supported by this server.", "unsupported")
    found = [ask for name in _KINDS if (ask := _by_name(options, name, name)) is not None]
    if options.boolean("json_object"):
        found.append(GrammarAsk(options.path("json_object"), "json_schema", _ANY_OBJECT))
    if len(found) != 1:
        raise bad_field("structured_outputs", f"structured_outputs must hold one grammar, got {len(found)}.")
    return found[0]


def _by_name(fields: Fields, name: str, kind: str) -> GrammarAsk | None:
    value, path = fields.get(name), fields.path(name)
    return None if value is None else GrammarAsk(path, _KINDS[kind], _READERS[kind](value, path))


def _json(value: Any, path: str) -> str:
    """A schema, or its text."""
    if not isinstance(value, str):
        return schema_text(value, path)
    try:
        return schema_text(decode_json(checked_text(path, value)), path)
    except msgspec.MsgspecError as exc:
        raise _not_json(path, exc) from None


def _not_json(path: str, exc: Exception) -> ApiError:
    return bad_field(path, f"{path} is not JSON: {exc}")


def _regex(value: Any, path: str) -> str:
    """The whole answer must match, so that anchors at the ends say nothing."""
    text = checked_text(path, value).removeprefix("^")
    if text.endswith("$") and not text.endswith("\\$"):
        text = text[:-1]
    if not text:
        raise bad_field(path, f"{path} matches only an empty answer.")
    return text


def _choice(value: Any, path: str) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise bad_field(path, f"{path} must be a list of 1 to {MAX_CHOICES} texts.")
    texts = [checked_text(path, str(item) if type(item) in (int, float) else item) for item in value]
    if "" in texts:
        raise bad_field(path, f"{path} must not hold an empty text.")
    return msgspec.json.encode(texts).decode()


_READERS: dict[str, Callable[[Any, str], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": lambda value, path: checked_text(path, value),
}
