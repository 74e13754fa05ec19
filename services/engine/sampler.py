"""Chooses tokens. What is drawn is a function of (logits, params, seed, choice, position) alone.

How a uniform number picks a token is told in `kernels.sampling`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import adjust_logits, draw_tokens, mask_logits, tell_logprobs
from services.engine.adjustments import adjustments, bounded, is_adjusted
from services.engine.types import SampleSpec
from shared.errors import ModelError
from shared.messages import TokenLogprobs

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
LEAST_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
"""What lies beyond counts as these: float32 has no room for it, and one request must not fail a step of many."""


Floats = npt.NDArray[np.float64]


AllowedTokens = npt.NDArray[np.uint32]
"""`[num_rows, ceil(vocab / 32)]`: bit `t % 32` of word `t // 32` says whether token t may be chosen (llguidance's
layout). At least one token of each row must be allowed; a row without a constraint has all bits set."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens of a step's rows. `logprobs` is empty where no row asked; else None in rows that did not."""

    tokens: list[int]
    logprobs: Sequence[TokenLogprobs | None] = ()


def sample(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    num_threads: int = 1,
    allowed: AllowedTokens | None = None,
) -> Choice:
    """One token per row. Temperature 0 is the best-ranked token. May change `logits`.

    What `specs` ask for cannot fail: extreme values are bounded.

    In this order: the allowed tokens, biases and the wait for min_tokens, penalties, temperature, min-p, top-k, top-p.
    Log-probabilities are those of the logits as they came.

    :param logits: float32 `[num_rows, vocab]`.
    :param allowed: None where no row is constrained.
    :raises ModelError: a chosen logit is not finite: the weights or the KV are broken.
    """
    values = logits.numpy()
    told = [row for row, spec in enumerate(specs) if spec.sampling.logprobs is not None]
    adjusted = [row for row, spec in enumerate(specs) if is_adjusted(spec)]
    changes = bool(adjusted) or allowed is not None
    before = values[told] if told and changes else values  # a copy: what is told is told of the model alone
    if allowed is not None:
        mask_logits(values, allowed, num_threads)
    if adjusted:
        adjust_logits(values, adjustments(specs, adjusted, values.shape[1]), num_threads)
    tokens = _choose(values, specs, num_threads)
    if not told:
        return Choice(tokens.tolist())
    rows = np.arange(len(told)) if changes else np.array(told)
    num_top = [specs[row].sampling.logprobs or 0 for row in told]
    logprobs: list[TokenLogprobs | None] = [None] * len(specs)
    for row, one in zip(told, token_logprobs(before, rows, tokens[told], num_top, num_threads), strict=True):
        logprobs[row] = one
    return Choice(tokens.tolist(), logprobs)


def token_logprobs(
    values: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    num_top: Sequence[int],
    num_threads: int = 1,
) -> list[TokenLogprobs]:
    """Of one token in each of `rows`, with so many of the row's best. values [num_rows, vocab].

    :raises ModelError: a row's best logit is not finite.
    """
    counts = np.array([min(max(count, 0), values.shape[1]) for count in num_top], np.int64)
    told = tell_logprobs(values, rows, tokens, counts, num_threads)
    if np.isnan(told.logprobs).any():
        raise ModelError("the model's logits are not finite")
    best = zip(told.top_ids.tolist(), told.top_logprobs.tolist(), counts.tolist(), strict=True)
    tops = [tuple(zip(ids[:count], logprobs[:count], strict=True)) for ids, logprobs, count in best]
    return [
        TokenLogprobs(logprob, rank, top)
        for logprob, rank, top in zip(told.logprobs.tolist(), told.ranks.tolist(), tops, strict=True)
    ]


def _choose(values: npt.NDArray[np.float32], specs: Sequence[SampleSpec], num_threads: int) -> npt.NDArray[np.int64]:
    drawn = [row for row, spec in enumerate(specs) if spec.sampling.temperature > 0 and spec.sampling.top_k != 1]
    if len(drawn) == len(specs):
        tokens = _draw(values, specs, num_threads)
    else:
        tokens = values.argmax(axis=-1)
        if drawn:
            tokens[drawn] = _draw(values[drawn], [specs[row] for row in drawn], num_threads)
    if not all(isfinite(values.item(row, token)) for row, token in enumerate(tokens.tolist())):
        raise ModelError("the model's logits are not finite")
    return tokens


def uniform(specs: Sequence[SampleSpec]) -> Floats:
    """A number in [0, 1) per (seed, choice, position): counters through SplitMix64's finaliser (Steele et al. 2014)."""
    state = np.zeros(len(specs), np.uint64)
    for counter in (
        [spec.sampling.seed & _MASK for spec in specs],
        [spec.choice for spec in specs],
        [spec.position for spec in specs],
    ):
        state = _mix(state ^ (np.array(counter, np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _top_k(asked: int, vocab: int) -> int:
    return min(asked, vocab) if asked > 0 else vocab


def _draw(values: npt.NDArray[np.float32], specs: Sequence[SampleSpec], num_threads: int) -> npt.NDArray[np.int64]:
    """Sampled rows only. values [num_rows, vocab].

    :raises ModelError: a row has no finite best logit.
    """
    count, vocab = values.shape
    tokens = draw_tokens(
        values,
        bounded((spec.sampling.temperature for spec in specs), count, LEAST_TEMPERATURE, MAX_TEMPERATURE, off=1.0),
        np.fromiter((_top_k(spec.sampling.top_k, vocab) for spec in specs), np.int64, count),
        np.fromiter((spec.sampling.top_p for spec in specs), np.float64, count),
        bounded((spec.sampling.min_p for spec in specs), count, 0.0, 1.0),
        uniform(specs),
        num_threads,
    )
    if (tokens < 0).any():
        raise ModelError("the model's logits are not finite")
    return tokens
