"""The parameters that both endpoints share, and the ones that are refused because this server would ignore
them and so give another answer than was asked for."""

from dataclasses import dataclass, field
from typing import Any

from services.gateway.choice import Shown
from services.gateway.errors import ApiError, bad_field
from services.gateway.fields import Fields, checked_text
from services.gateway.output_params import Changes, read_changes, read_choices, read_shown, wants_logprobs
from services.gateway.structured import GrammarAsk, read_grammar

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
_INT64 = 2**63
LEAST_TEMPERATURE = 0.01
"""A temperature above 0 but below this counts as this, as in vLLM: the best token is all but sure there already, and
much smaller ones are no numbers of float32."""

_PRIORITIES = 1000
_ONE_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOP_SCHEMA = {"anyOf": [_ONE_STOP, {"type": "array", "items": _ONE_STOP, "maxItems": MAX_STOPS}]}

_OFF: tuple[Any, ...] = (False, 0, [], {}, "")
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "typical_p",
            "suffix",
            "functions",
            "bad_words",
            "documents",
            "use_beam_search",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "prompt_embeds",
            "truncate_prompt_tokens",
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "audio",
            "prediction",
            "chat_template",
            "json_schema",
            "grammar",
            "web_search_options",
            "reasoning_effort",
            "response_prefix",
            "logits_processors",
            "best_of_sequences",
            "logprob_token_ids",
            "structural_tag",
            "thinking_token_budget",
        ),
        (False, [], {}, ""),
    ),
    "guided_whitespace_pattern": ("",),
    "include_reasoning": (True,),
    "detokenize": (True,),
    "length_penalty": (1,),
    "verbosity": ("medium",),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
}
"""Field -> the values (beside null) with which it changes nothing."""


@dataclass(frozen=True, slots=True)
class Params:
    """What a client asked for, checked; the model's limits are not applied yet."""

    max_tokens: int | None  # 0: only the prompt is asked about
    temperature: float  # 0, or LEAST_TEMPERATURE at least
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    n: int = 1
    best_of: int = 1  # so many are generated, and the n best are the answer
    changes: Changes = field(default_factory=Changes)
    shown: Shown = field(default_factory=Shown)
    priority: int = 0
    wants_logprobs: bool = False
    grammar: GrammarAsk | None = None


def refuse_unsupported(fields: Fields) -> None:
    """:raises ApiError: 400 that names a field which is set to something that matters."""
    for name, value in fields.raw.items():
        harmless = REFUSED.get(name)
        if value is None or harmless is None or any(same_json(value, other) for other in harmless):
            continue
        raise bad_field(name, f"{name} is not supported by this server.", "unsupported")


def same_json(a: Any, b: Any) -> bool:
    """Equal in JSON, where true is not 1."""
    return a == b and (type(a) is bool) == (type(b) is bool)


def read_params(fields: Fields, *, chat: bool) -> Params:
    """:raises ApiError: 400 that names the first field which is wrong."""
    refuse_unsupported(fields)
    max_tokens = fields.integer("max_tokens", 1 if chat else 0, _INT64 - 1)
    max_completion_tokens = fields.integer("max_completion_tokens", 1, _INT64 - 1)
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1, above_low=True)
    top_k = fields.integer("top_k", -1, 2**31 - 1)  # -1 and 0: off
    seed = fields.integer("seed", -_INT64, _INT64 - 1)
    stream = fields.boolean("stream")
    if max_completion_tokens is not None:
        max_tokens = max_completion_tokens
    n, best_of = read_choices(fields, chat=chat, stream=stream)
    stop = _stop(fields)
    return Params(
        max_tokens=max_tokens,
        temperature=_temperature(temperature),
        top_p=1.0 if top_p is None else top_p,
        top_k=max(top_k or 0, 0),
        seed=None if seed is None else seed % _INT64,
        stop=stop,
        ignore_eos=fields.boolean("ignore_eos"),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        n=n,
        best_of=best_of,
        changes=read_changes(fields, chat=chat, scored=best_of > n),
        shown=read_shown(fields, stop, chat=chat, prompt_only=max_tokens == 0, scored=best_of > n),
        wants_logprobs=wants_logprobs(fields),
        priority=fields.integer("priority", -_PRIORITIES, _PRIORITIES) or 0,
        grammar=read_grammar(fields),
    )


def check_model(fields: Fields, served: str) -> None:
    """:raises ApiError: 404 for another model than the one served, which is also called `default`."""
    name = fields.text("model")
    if name not in (None, served, "default"):
        raise unknown_model(name)


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name[:200]!r} does not exist.", param="model", code="model_not_found")


def _temperature(asked: float | None) -> float:
    if asked is None:
        return 1.0
    return max(asked, LEAST_TEMPERATURE) if asked > 0 else 0.0


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop", STOP_SCHEMA)
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise bad_field("stop", f"stop may hold at most {MAX_STOPS} strings.")
    for stop in stops:
        if not 0 < len(checked_text("stop", stop)) <= MAX_STOP_CHARS:
            raise bad_field("stop", f"A stop string must have 1 to {MAX_STOP_CHARS} characters.")
    return tuple(dict.fromkeys(stops))


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    wanted = options.boolean("include_usage")
    if options.raw and not stream:
        raise bad_field("stream_options", "stream_options is allowed only with stream: true.")
    return wanted
