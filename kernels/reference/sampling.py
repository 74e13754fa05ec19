"""Choosing tokens with numpy. Ranks are known only as far as needed: the `CANDIDATES` best of each row are sorted,
and a row whose answer lies beyond them is ranked in full."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from kernels.sampling import Adjustments

CANDIDATES = 256

Floats = npt.NDArray[np.float64]


def draw_tokens(
    logits: npt.NDArray[np.float32],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: Floats,
    least: npt.NDArray[np.float32],
    u: Floats,
    num_threads: int = 1,
) -> npt.NDArray[np.int64]:
    """See `kernels.sampling.draw_tokens`. `least`: logarithm of min_p."""
    finite = np.isfinite(logits.max(axis=-1))
    tokens = np.full(len(logits), -1)
    if finite.any():
        values, cold = logits[finite], temperature[finite][:, None]
        enough = ((values - values.max(axis=-1, keepdims=True)) / cold >= least[finite][:, None]).sum(axis=-1)
        kept = np.minimum(top_k[finite], np.maximum(enough, 1))
        tokens[finite] = _draw(values, temperature[finite].astype(np.float64), kept, top_p[finite], u[finite])
    return tokens


def mask_logits(logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.uint32]) -> None:
    """See `kernels.sampling.mask_logits`."""
    octets = np.ascontiguousarray(allowed).view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, count=logits.shape[1], bitorder="little")
    logits[bits == 0] = -np.inf


def adjust_logits(logits: npt.NDArray[np.float32], how: "Adjustments") -> None:
    """See `kernels.sampling.adjust_logits`."""
    one = np.float32(1)
    for i, row in enumerate(how.rows):
        x = logits[row]
        biased = slice(how.bias_start[i], how.bias_start[i + 1])
        np.add.at(x, how.bias_ids[biased], how.bias[biased])
        tokens = how.tokens[how.token_start[i] : how.token_start[i + 1]]
        seen = np.unique(tokens)
        x[seen] = np.where(x[seen] > 0, x[seen] / how.repetition[i], x[seen] * how.repetition[i])
        said, times = np.unique(tokens[how.num_prompt[i] :], return_counts=True)
        x[said] -= how.frequency[i] * times.astype(np.float32)
        x[said] -= how.presence[i] * one


def tell_logprobs(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    num_top: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The fields of `kernels.sampling.Told`."""
    wide = torch.from_numpy(logits[rows]).double().log_softmax(dim=-1).numpy()
    values, width = logits[rows], int(num_top.max(initial=0))
    own = np.arange(len(rows))
    ranks = (values > values[own, tokens][:, None]).sum(axis=-1) + 1
    order = np.argsort(-values, axis=-1, kind="stable")[:, :width].astype(np.int32)
    top = np.take_along_axis(wide, order.astype(np.int64), axis=-1)
    return wide[own, tokens].astype(np.float32), ranks, order, top.astype(np.float32)


def _draw(
    values: npt.NDArray[np.float32], temperature: Floats, top_k: npt.NDArray[np.int64], top_p: Floats, u: Floats
) -> npt.NDArray[np.int64]:
    """Rows without NaN or +infinity. values [num_rows, vocab]."""
    vocab = values.shape[1]
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
