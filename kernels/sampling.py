"""Drawing tokens: many rows of logits in one call.

Tokens are ranked by logit, ties by lower id. top-k keeps the first k of the ranking, top-p the shortest start of what
is left that holds its share of the weight, and one uniform number in [0, 1) picks among the kept by inverting their
cumulated weights. A row's token depends on the row and its parameters alone.
"""

import numpy as np
import numpy.typing as npt

from kernels.decoder import extension
from kernels.reference import sampling as reference


def draw_tokens(
    logits: npt.NDArray[np.float32],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    u: npt.NDArray[np.float64],
    num_threads: int = 1,
) -> npt.NDArray[np.int64]:
    """One token per row, -1 where the best logit is not finite or a logit is NaN.

    :param logits: `[num_rows, vocab]`, contiguous. :param temperature: above 0. :param top_k: 1..vocab; vocab is off.
    :param top_p: 1 is off. :param u: in [0, 1). All `[num_rows]`.
    """
    assert logits.flags.c_contiguous, "logits: contiguous"
    kernels = extension()
    if kernels is None:
        return reference.draw_tokens(logits, temperature, top_k, top_p, u, num_threads)
    tokens = np.empty(len(logits), np.int64)
    kernels.draw_tokens(logits, temperature, top_k, top_p, u, tokens, num_threads, True)
    return tokens


def mask_logits(logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.uint32]) -> None:
    """Logits of tokens whose bit is not set become -infinity. Mutates `logits`.

    :param logits: `[num_rows, vocab]`. :param allowed: `[num_rows, ceil(vocab / 32)]`, bit `t % 32` of word `t // 32`
        for token t; bits beyond the vocabulary mean nothing.
    """
    vocab = logits.shape[1]
    assert allowed.dtype == np.uint32, "allowed: uint32"
    assert allowed.shape == (len(logits), -(-vocab // 32)), "allowed: one bit per token"
    bits = np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), axis=-1, count=vocab, bitorder="little")
    logits[bits == 0] = -np.inf
