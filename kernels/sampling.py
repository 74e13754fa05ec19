"""Choosing tokens: many rows of logits in one call, changed, drawn from, and told of.

Tokens are ranked by logit, ties by lower id. min-p and top-k keep the first of the ranking, top-p the shortest start of
what is left that holds its share of the weight, and one uniform number in [0, 1) picks among the kept by inverting
their cumulated weights. A row's token depends on the row and its parameters alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.decoder import extension
from kernels.reference import sampling as reference

Logits = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is done to some rows' logits. Of row `rows[i]` are `bias_ids[bias_start[i]:bias_start[i + 1]]` and so on."""

    rows: Longs  # [num_adjusted]
    bias_start: Longs  # [num_adjusted + 1]
    bias_ids: Ints  # [num_biases]
    bias: Floats  # [num_biases], added
    token_start: Longs  # [num_adjusted + 1]
    tokens: Ints  # [num_tokens], prompt first, then output
    num_prompt: Longs  # [num_adjusted], of the row's tokens
    repetition: Floats  # [num_adjusted]: logits of all these tokens are divided by it if above 0, else multiplied
    frequency: Floats  # [num_adjusted], taken off as often as the output has the token
    presence: Floats  # [num_adjusted], taken off once if the output has it


@dataclass(frozen=True, slots=True)
class Told:
    """Natural logarithms of probabilities; NaN in rows with a NaN or +infinity."""

    logprobs: Floats  # [num_told], of the tokens asked for
    ranks: Longs  # [num_told], 1 = no token has a higher logit
    top_ids: Ints  # [num_told, max_top], best first; a row's entries beyond its num_top mean nothing
    top_logprobs: Floats  # [num_told, max_top]


def draw_tokens(
    logits: Logits, temperature: Floats, top_k: Longs, top_p: Doubles, min_p: Floats, u: Doubles, num_threads: int = 1
) -> Longs:
    """One token per row, -1 where the best logit is not finite or a logit is NaN.

    :param logits: `[num_rows, vocab]`, contiguous. :param temperature: above 0. :param top_k: 1..vocab; vocab is off.
    :param top_p: 1 is off. :param min_p: least weight as a part of the best one's; 0 is off. :param u: in [0, 1). All
        `[num_rows]`.
    """
    assert logits.flags.c_contiguous, "logits: contiguous"
    with np.errstate(divide="ignore"):
        least = np.log(min_p)  # float32: both bodies compare the same numbers
    kernels = extension()
    if kernels is None:
        return reference.draw_tokens(logits, temperature, top_k, top_p, least, u, num_threads)
    tokens = np.empty(len(logits), np.int64)
    kernels.draw_tokens(logits, temperature, top_k, top_p, least, u, tokens, num_threads, True)
    return tokens


def mask_logits(logits: Logits, allowed: npt.NDArray[np.uint32], num_threads: int = 1) -> None:
    """Logits of tokens whose bit is not set become -infinity. Mutates `logits`.

    :param logits: `[num_rows, vocab]`. :param allowed: `[num_rows, ceil(vocab / 32)]`, bit `t % 32` of word `t // 32`
        for token t; bits beyond the vocabulary mean nothing.
    """
    assert allowed.dtype == np.uint32, "allowed: uint32"
    assert allowed.shape == (len(logits), -(-logits.shape[1] // 32)), "allowed: one bit per token"
    kernels = extension()
    if kernels is None:
        reference.mask_logits(logits, allowed)
    else:
        kernels.mask_logits(logits, np.ascontiguousarray(allowed), num_threads)


def adjust_logits(logits: Logits, how: Adjustments, num_threads: int = 1) -> None:
    """Add biases, then penalise repeated tokens. Mutates the named rows of `logits`, each of which is named once.

    Repetition as in Keskar et al. 2019 (CTRL), frequency and presence as in OpenAI's API.

    :raises IndexError: a row or a token that does not exist; nothing was changed.
    """
    kernels = extension()
    if kernels is None:
        reference.adjust_logits(logits, how)
        return
    kernels.adjust_logits(
        logits,
        how.rows,
        how.bias_start,
        how.bias_ids,
        how.bias,
        how.token_start,
        how.tokens,
        how.num_prompt,
        how.repetition,
        how.frequency,
        how.presence,
        num_threads,
    )


def tell_logprobs(logits: Logits, rows: Longs, tokens: Longs, num_top: Longs, num_threads: int = 1) -> Told:
    """Log-probabilities of one token in each of the rows, and of its best ones.

    :param rows, tokens, num_top: `[num_told]`; num_top is 0..vocab.
    :raises IndexError: a row or a token that does not exist.
    """
    kernels = extension()
    if kernels is None:
        return Told(*reference.tell_logprobs(logits, rows, tokens, num_top))
    count, width = len(rows), int(num_top.max(initial=0))
    told = Told(
        np.empty(count, np.float32),
        np.empty(count, np.int64),
        np.empty((count, width), np.int32),
        np.empty((count, width), np.float32),
    )
    kernels.tell_logprobs(
        logits, rows, tokens, num_top, told.logprobs, told.ranks, told.top_ids, told.top_logprobs, num_threads, True
    )
    return told
