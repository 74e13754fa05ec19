"""Chooses tokens. What is drawn is a function of (logits, params, seed, choice, position) alone.

How a uniform number picks a token is told in `kernels.sampling`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import draw_tokens, mask_logits
from services.engine.types import SampleSpec
from shared.errors import ModelError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1

Floats = npt.NDArray[np.float64]


AllowedTokens = npt.NDArray[np.uint32]
"""`[num_rows, ceil(vocab / 32)]`: bit `t % 32` of word `t // 32` says whether token t may be chosen (llguidance's
layout). At least one token of each row must be allowed; a row without a constraint has all bits set."""


def sample(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    num_threads: int = 1,
    allowed: AllowedTokens | None = None,
) -> list[int]:
    """One token per row. Temperature 0 is the best-ranked token. May change `logits`.

    :param logits: float32 `[num_rows, vocab]`.
    :param allowed: None where no row is constrained.
    :raises ModelError: a chosen logit is not finite: the weights or the KV are broken.
    """
    values = logits.numpy()
    if allowed is not None:
        mask_logits(values, allowed)
    drawn = [row for row, spec in enumerate(specs) if spec.sampling.temperature > 0 and spec.sampling.top_k != 1]
    tokens = np.empty(len(specs), np.int64)
    if len(drawn) < len(specs):
        tokens[:] = values.argmax(axis=-1)
    if drawn:
        rows = values if len(drawn) == len(specs) else values[drawn]
        tokens[drawn] = _draw(rows, [specs[row] for row in drawn], num_threads)
    if not np.isfinite(values[np.arange(len(specs)), tokens]).all():
        raise ModelError("the model's logits are not finite")
    return tokens.tolist()


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


def _draw(values: npt.NDArray[np.float32], specs: Sequence[SampleSpec], num_threads: int) -> npt.NDArray[np.int64]:
    """Sampled rows only. values [num_rows, vocab].

    :raises ModelError: a row has no finite best logit.
    """
    count, vocab = values.shape
    tokens = draw_tokens(
        values,
        np.fromiter((spec.sampling.temperature for spec in specs), np.float32, count),
        np.fromiter((min(spec.sampling.top_k or vocab, vocab) for spec in specs), np.int64, count),
        np.fromiter((spec.sampling.top_p for spec in specs), np.float64, count),
        uniform(specs),
        num_threads,
    )
    if (tokens < 0).any():
        raise ModelError("the model's logits are not finite")
    return tokens
