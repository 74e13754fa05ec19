"""What `baton bench kernels` times of the choice of tokens.

Logits are normal numbers with a deviation of 4 (a few thousand of them are near the best, as in a model's), found where
the last call left them, as a step finds what the LM head has just written. One thread takes a row.
"""

from collections.abc import Callable, Iterator

import numpy as np

from kernels.bench import Case
from kernels.bench_cases import ROWS
from kernels.sampling import Adjustments, adjust_logits, draw_tokens, mask_logits, tell_logprobs

TOKENS, OUTPUT, BIASES, TOP = 320, 64, 16, 5
"""Of each adjusted row: tokens of its seq, how many of those are output, biases; and best tokens told of a row."""
CALL_ROWS = 8  # a call goes over at least so many


class SamplingCases:
    def __init__(self, vocab: int, num_threads: int, rows: tuple[int, ...] = ROWS) -> None:
        self._vocab, self._all_threads = vocab, num_threads
        self._rng = np.random.default_rng(0)
        self._logits = 4 * self._rng.standard_normal((max(rows), vocab), np.float32)
        self._rows = rows

    def all(self) -> Iterator[Case]:
        for num_rows in self._rows:
            yield self.draw("draw_tokens", num_rows, top_k=self._vocab, top_p=1.0)
            yield self.draw("draw_tokens top-k top-p", num_rows, top_k=40, top_p=0.95)
            yield self.tell(num_rows)
            yield self.adjust(num_rows)
            yield self.mask(num_rows)

    def draw(self, op: str, num_rows: int, *, top_k: int, top_p: float) -> Case:
        """Best logit, then of each one its distance, that divided by the temperature, an exponential, and a sum."""
        logits, threads = self._logits[:num_rows], self._threads(num_rows)
        temperature, ks = np.full(num_rows, 0.8, np.float32), np.full(num_rows, top_k, np.int64)
        ps, min_p = np.full(num_rows, top_p), np.zeros(num_rows, np.float32)
        u = self._rng.random(num_rows)

        def once() -> None:
            draw_tokens(logits, temperature, ks, ps, min_p, u, threads)

        return self._case(op, num_rows, 4 * num_rows * self._vocab, 5 * num_rows * self._vocab, once)

    def tell(self, num_rows: int) -> Case:
        """As a draw, and a comparison of each logit with the token's."""
        logits, threads, rows = self._logits[:num_rows], self._threads(num_rows), np.arange(num_rows)
        tokens, num_top = self._rng.integers(0, self._vocab, num_rows), np.full(num_rows, TOP)

        def once() -> None:
            tell_logprobs(logits, rows, tokens, num_top, threads)

        return self._case(
            f"tell_logprobs top {TOP}", num_rows, 4 * num_rows * self._vocab, 6 * num_rows * self._vocab, once
        )

    def adjust(self, num_rows: int) -> Case:
        """Biases: an addition each. Tokens of the seq: counted (2), divided by the repetition penalty, times the
        frequency penalty, twice subtracted; a token, its logit and what becomes of it are 12 bytes."""
        logits, threads = self._logits[:num_rows].copy(), self._threads(num_rows)

        def ids(count: int) -> np.ndarray:
            return self._rng.integers(0, self._vocab, num_rows * count).astype(np.int32)

        how = Adjustments(
            rows=np.arange(num_rows),
            bias_start=np.arange(num_rows + 1) * BIASES,
            bias_ids=ids(BIASES),
            bias=np.full(num_rows * BIASES, 1e-3, np.float32),
            token_start=np.arange(num_rows + 1) * TOKENS,
            tokens=ids(TOKENS),
            num_prompt=np.full(num_rows, TOKENS - OUTPUT),
            repetition=np.ones(num_rows, np.float32),  # the same work as any, and logits stay what they are
            frequency=np.full(num_rows, 1e-3, np.float32),
            presence=np.full(num_rows, 1e-3, np.float32),
        )

        def once() -> None:
            adjust_logits(logits, how, threads)

        num_bytes, work = 16 * BIASES + 12 * TOKENS, BIASES + 6 * TOKENS
        return self._case("adjust_logits", num_rows, num_rows * num_bytes, num_rows * work, once)

    def mask(self, num_rows: int) -> Case:
        """Half of the tokens, at random: a bit tested for each, and a number written for each that is not allowed."""
        logits, threads = self._logits[:num_rows].copy(), self._threads(num_rows)
        words = -(-self._vocab // 32)
        allowed = self._rng.integers(0, 1 << 32, (num_rows, words), np.uint32)

        def once() -> None:
            mask_logits(logits, allowed, threads)

        num_bytes = 4 * words + 2 * self._vocab
        return self._case("mask_logits", num_rows, num_rows * num_bytes, num_rows * self._vocab, once)

    def _threads(self, num_rows: int) -> int:
        return min(self._all_threads, num_rows)

    def _case(self, op: str, num_rows: int, num_bytes: int, work: int, once: Callable[[], None]) -> Case:
        count = -(-CALL_ROWS // num_rows)

        def call() -> int:
            for _ in range(count):
                once()
            return count

        return Case(
            op,
            f"{num_rows} x {self._vocab}",
            num_bytes,
            {"float32": work},
            call,
            num_threads=self._threads(num_rows),
        )
