"""From the params of a step's rows to the arrays that change their logits. Only rows that ask for a change appear."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kernels.sampling import Adjustments
from services.engine.types import SampleSpec
from shared.messages import SamplingParams

FORBIDDEN = -1e30
"""Added to the logit of a token that may not be chosen yet. Finite, so that where a grammar allows nothing else the
grammar wins and the row stays drawable."""


MAX_CHANGE = 1e4
"""Of one bias or penalty of a client's. Doors bound them much closer; here no request may make a logit infinite, since
that would fail the whole step, other requests' rows too."""

MAX_REPETITION = 100.0
"""And its inverse is the least."""

Floats = npt.NDArray[np.float32]


def bounded(values: Iterable[float], count: int, low: float, high: float, *, off: float = 0.0) -> Floats:
    """`[count]`, each between `low` and `high` whatever was asked for. Bounded before they become float32, where tiny
    ones would be 0 and huge ones infinite. :param off: stands for NaN."""
    wide = np.fromiter(values, np.float64, count)
    wide[np.isnan(wide)] = off
    return np.clip(wide, low, high).astype(np.float32)


def is_penalised(params: SamplingParams) -> bool:
    """Whether logits depend on the tokens so far."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def must_go_on(spec: SampleSpec) -> bool:
    """Whether the next token may not end the seq yet."""
    return spec.position - spec.num_prompt_tokens < spec.sampling.min_tokens


def is_adjusted(spec: SampleSpec) -> bool:
    params = spec.sampling
    return bool(params.logit_bias) or is_penalised(params) or (params.min_tokens > 0 and must_go_on(spec))


def adjustments(specs: Sequence[SampleSpec], rows: Sequence[int], vocab_size: int) -> Adjustments:
    """What is done to the logits of `rows`, whose specs are `specs[row]`. Pure functions of (request, output)."""
    chosen = [specs[row] for row in rows]
    biases = [_biases(spec, vocab_size) for spec in chosen]
    tokens = [spec.tokens[: spec.position] if is_penalised(spec.sampling) else () for spec in chosen]
    count = len(chosen)
    params = [spec.sampling for spec in chosen]
    return Adjustments(
        rows=np.array(rows, np.int64),
        bias_start=_starts(biases),
        bias_ids=np.array([token for pairs in biases for token, _ in pairs], np.int32),
        bias=np.array([value for pairs in biases for _, value in pairs], np.float32),
        token_start=_starts(tokens),
        tokens=np.fromiter(chain.from_iterable(tokens), np.int32, sum(map(len, tokens))),
        num_prompt=np.fromiter((spec.num_prompt_tokens for spec in chosen), np.int64, count),
        repetition=bounded((p.repetition_penalty for p in params), count, 1 / MAX_REPETITION, MAX_REPETITION, off=1.0),
        frequency=bounded((p.frequency_penalty for p in params), count, -MAX_CHANGE, MAX_CHANGE),
        presence=bounded((p.presence_penalty for p in params), count, -MAX_CHANGE, MAX_CHANGE),
    )


def _biases(spec: SampleSpec, vocab_size: int) -> list[tuple[int, float]]:
    """The client's, and those that keep a seq from ending too early."""
    params = spec.sampling
    ids = [token for token, _ in params.logit_bias]
    biases = bounded((bias for _, bias in params.logit_bias), len(ids), -MAX_CHANGE, MAX_CHANGE).tolist()
    pairs = [pair for pair in zip(ids, biases, strict=True) if 0 <= pair[0] < vocab_size]
    if params.min_tokens and must_go_on(spec):
        pairs += [(token, FORBIDDEN) for token in params.stop_token_ids if 0 <= token < vocab_size]
    return pairs


def _starts(parts: Sequence[Sequence[object]]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)
