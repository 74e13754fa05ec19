"""The parameters that change probabilities, ask for log-probabilities, or say how answers look."""

import math
from dataclasses import dataclass
from typing import Any

from services.gateway.choice import Shown
from services.gateway.errors import bad_field
from services.gateway.fields import Fields

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_STOP_TOKENS = 128
LEAST_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100
_INT32 = 2**31 - 1
LOGIT_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
}
STOP_TOKENS_SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": _INT32},
    "maxItems": MAX_STOP_TOKENS,
}


@dataclass(frozen=True, slots=True)
class Changes:
    """As in `shared.messages.SamplingParams`."""

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def read_choices(fields: Fields, *, chat: bool, stream: bool) -> tuple[int, int]:
    """`n` and `best_of`, which is at least as many. All of them from one computation of the prompt.

    :raises ApiError: 400 that names the field.
    """
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if chat and best_of not in (None, 1):
        raise bad_field("best_of", "best_of is a parameter of /v1/completions alone.", "unsupported")
    if best_of is None or chat:
        return n, n
    if best_of < n:
        raise bad_field("best_of", f"best_of must be at least n, which is {n}.")
    if best_of > n and stream:
        raise bad_field("best_of", "Which choices are the best is known at the end: best_of cannot be streamed.")
    return n, best_of


def read_changes(fields: Fields, *, chat: bool, scored: bool) -> Changes:
    """:param scored: the choices' log-probabilities are needed in any case.
    :raises ApiError: 400 that names the first field which is wrong.
    """
    logprobs = _chat_logprobs(fields) if chat else fields.integer("logprobs", 0, MAX_TOP_LOGPROBS, off=False)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS, off=False)
    if fields.boolean("echo") and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    repetition = fields.number("repetition_penalty", LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    return Changes(
        min_p=fields.number("min_p", 0, 1) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(fields),
        min_tokens=fields.integer("min_tokens", 0, _INT32) or 0,
        stop_token_ids=_stop_token_ids(fields),
        logprobs=0 if scored and logprobs is None else logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def wants_logprobs(fields: Fields) -> bool:
    """Whether the client wants to see those of the answer."""
    value = fields.get("logprobs")
    return value is not None and value is not False


def read_shown(fields: Fields, stops: tuple[str, ...], *, chat: bool, prompt_only: bool, scored: bool) -> Shown:
    """:raises ApiError: 400 that names the first field which is wrong."""
    echo = fields.boolean("echo")
    if chat and echo:
        raise bad_field("echo", "echo is a parameter of /v1/completions alone.", "unsupported")
    return Shown(
        stops=stops,
        include_stop=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        echo=echo,
        logprobs=scored or wants_logprobs(fields),
        prompt_only=prompt_only,
    )


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise bad_field("top_logprobs", "top_logprobs is allowed only with logprobs: true.")
    return (top or 0) if wanted else None


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    value: Any = fields.get("logit_bias", LOGIT_BIAS_SCHEMA)
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise bad_field("logit_bias", f"logit_bias must be an object of at most {MAX_BIASES} token ids with numbers.")
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise bad_field("logit_bias", f"logit_bias: {key[:40]!r} is not a token id.")
        if type(bias) not in (int, float) or not math.isfinite(bias) or not -100 <= bias <= 100:
            raise bad_field("logit_bias", f"logit_bias: the bias of token {key} must be between -100 and 100.")
        out[int(key)] = float(bias)
    return tuple(out.items())


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    value: Any = fields.get("stop_token_ids", STOP_TOKENS_SCHEMA)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKENS:
        raise bad_field("stop_token_ids", f"stop_token_ids must be a list of at most {MAX_STOP_TOKENS} token ids.")
    if any(type(token) is not int or not 0 <= token <= _INT32 for token in value):
        raise bad_field("stop_token_ids", "stop_token_ids must be token ids.")
    return tuple(dict.fromkeys(value))
