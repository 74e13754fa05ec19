"""Chooses tokens. What is drawn is a function of (logits, params, seed, choice, position) alone.

Tokens are ranked by logit, ties by lower id. top-k keeps the first k of the ranking, top-p the shortest start
of what is left that holds its share of the probability, and one uniform number in [0, 1) picks among the kept
by inverting their cumulated weights. Ranks are known only as far as needed: the `CANDIDATES` best of each row
are sorted, and a row whose answer lies beyond them is ranked in full.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.engine.types import SampleSpec
from shared.errors import ModelError

CANDIDATES = 256

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1

Floats = npt.NDArray[np.float64]


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """One token per row. Temperature 0 is the best-ranked token.

    :param logits: float32 `[num_rows, vocab]`.
    :raises ModelError: a chosen logit is not finite: the weights or the KV are broken.
    """
    values = logits.numpy()
    drawn = [row for row, spec in enumerate(specs) if spec.sampling.temperature > 0 and spec.sampling.top_k != 1]
    tokens = np.empty(len(specs), np.int64)
    if len(drawn) < len(specs):
        tokens[:] = values.argmax(axis=-1)
    if drawn:
        tokens[drawn] = _draw(values[drawn], [specs[row] for row in drawn])
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


def _draw(values: npt.NDArray[np.float32], specs: Sequence[SampleSpec]) -> npt.NDArray[np.int64]:
    """Sampled rows only. values [num_rows, vocab]."""
    vocab = values.shape[1]
    temperature = np.array([spec.sampling.temperature for spec in specs])
    top_p = np.array([spec.sampling.top_p for spec in specs])
    top_k = np.array([spec.sampling.top_k or vocab for spec in specs]).clip(max=vocab)
    u = uniform(specs)
    best = values.max(axis=-1)
    # float32 exponentials, summed in float64 row by row: fast, and blind to the other rows.
    total = np.exp((values - best[:, None]) / temperature[:, None].astype(np.float32)).sum(-1, dtype=np.float64)

    ids, ranked, known = _candidates(values)
    weights = np.exp((ranked.astype(np.float64) - best[:, None]) / temperature[:, None])
    chosen = _invert(weights.cumsum(axis=-1), known, vocab, total, top_k, top_p, u)
    tokens = np.take_along_axis(ids, chosen[:, None].clip(min=0), axis=-1)[:, 0]
    for row in np.flatnonzero(chosen < 0):
        order = np.argsort(-values[row], kind="stable")
        weights = np.exp((values[row, order].astype(np.float64) - best[row]) / temperature[row])
        one = slice(row, row + 1)
        everything = np.array([vocab])
        rank = _invert(weights.cumsum()[None], everything, vocab, total[one], top_k[one], top_p[one], u[one])
        tokens[row] = order[rank[0]]
    return tokens


def _candidates(
    values: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The best of each row, ranked: ids, logits, and how many of them surely are the row's first. Behind the last
    candidate's logit there may be equal ones with lower ids, so those that equal it are not sure."""
    count = min(CANDIDATES, values.shape[1])
    found = torch.from_numpy(values).topk(count, dim=-1)
    ranked, ids = found.values.numpy(), found.indices.numpy()
    order = np.lexsort((ids, -ranked), axis=-1)
    ids, ranked = np.take_along_axis(ids, order, axis=-1), np.take_along_axis(ranked, order, axis=-1)
    if count == values.shape[1]:
        return ids, ranked, np.full(len(values), count)
    return ids, ranked, (ranked > ranked[:, -1:]).sum(axis=-1)


def _invert(
    cumulated: Floats,
    known: npt.NDArray[np.int64],
    vocab: int,
    total: Floats,
    top_k: npt.NDArray[np.int64],
    top_p: Floats,
    u: Floats,
) -> npt.NDArray[np.int64]:
    """Rank of each row's token, or -1 where the `known` first ranks do not tell.

    :param cumulated: weights of the first ranks, summed from the best on; [num_rows, num_ranks].
    """
    rows = np.arange(len(cumulated))
    last = cumulated.shape[1] - 1
    unsure = (top_k < vocab) & (top_k > known)
    mass = np.where(top_k < vocab, cumulated[rows, (top_k - 1).clip(max=last)], total)

    nucleus = (cumulated < (top_p * mass)[:, None]).sum(axis=-1) + 1  # ranks kept by top-p
    cut = top_p < 1
    unsure |= cut & (nucleus > known) & (known < vocab)
    kept = np.where(cut, np.minimum(nucleus, top_k), top_k)
    mass = np.where(cut, cumulated[rows, (kept - 1).clip(max=last)], mass)

    rank = (cumulated <= (u * mass)[:, None]).sum(axis=-1)
    rank = np.minimum(rank, kept - 1)  # rounding may leave u * mass at the very end
    return np.where(unsure | (rank >= known), -1, rank)
