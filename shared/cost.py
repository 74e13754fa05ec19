"""The cost model: how many seconds work will take, fitted to what it took. Pure: whoever has a clock hands in seconds.

prefill_s     = a + b * tokens + c * tokens * context
decode_step_s = a + b * seqs + c * kv_tokens
transfer_s    = a + b * bytes

A fit is least squares on relative errors over all observations, older ones counting less and less, with no coefficient
below zero (Lawson and Hanson's problem, of three unknowns at most: every support is tried).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

FORGET = 0.99
"""What an observation still counts after the next one: the last hundred make up two thirds."""
ERROR_MEMORY = 0.95
REFIT_EVERY = 16
RIDGE = 1e-9
TINY_S = 1e-7


class Fit:
    """`seconds = coefficients . (1, *features)`."""

    def __init__(self, *scales: float) -> None:
        """:param scales: typical sizes of the features, for the arithmetic's sake."""
        self._scales = (1.0, *scales)
        size = len(self._scales)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._scaled = [0.0] * size  # the fit, for scaled features
        self._due = 0  # observations until the next fit
        self.num_observed = 0
        self.error = 0.0  # mean of |predicted - actual| / actual, of late

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(c / scale for c, scale in zip(self._scaled, self._scales, strict=True))

    def predict(self, *features: float) -> float | None:
        """Seconds; None before the first observation."""
        if not self.num_observed:
            return None
        scaled, scales = self._scaled, self._scales
        seconds = scaled[0]
        for i, feature in enumerate(features, 1):
            seconds += scaled[i] * feature / scales[i]
        return seconds

    def observe(self, seconds: float, *features: float) -> None:
        """It took so long. A time too short to be measured is ignored."""
        if seconds < TINY_S:
            return
        if (predicted := self.predict(*features)) is not None:
            error = abs(predicted - seconds) / seconds
            self.error = error if self.num_observed == 1 else ERROR_MEMORY * self.error + (1 - ERROR_MEMORY) * error
        row = [1.0 / seconds]
        for i, feature in enumerate(features, 1):
            row.append(feature / self._scales[i] / seconds)
        moment, gram = self._moment, self._gram
        for i, left in enumerate(row):
            moment[i] = FORGET * moment[i] + left
            for j in range(i + 1):
                gram[i][j] = gram[j][i] = FORGET * gram[i][j] + left * row[j]
        self.num_observed += 1
        self._due -= 1
        if self._due <= 0 or self.num_observed < REFIT_EVERY:
            self._scaled, self._due = _non_negative(self._gram, self._moment), REFIT_EVERY


def _non_negative(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """x >= 0 that minimises x'Gx - 2 m'x."""
    size = len(moment)
    best, least = [0.0] * size, 0.0
    for count in range(1, size + 1):
        for support in combinations(range(size), count):
            part = _solve([[gram[i][j] for j in support] for i in support], [moment[i] for i in support])
            if part is None or min(part) < 0:
                continue
            value = -sum(x * moment[i] for x, i in zip(part, support, strict=True))  # at the optimum x'Gx = m'x
            if value < least - 1e-12 * abs(least):
                best, least = [0.0] * size, value
                for x, i in zip(part, support, strict=True):
                    best[i] = x
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with a touch of ridge; None if singular. Mutates its arguments."""
    size = len(right)
    for i in range(size):
        matrix[i][i] *= 1 + RIDGE
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-300:
            return None
        matrix[i], matrix[pivot], right[i], right[pivot] = matrix[pivot], matrix[i], right[pivot], right[i]
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            right[k] -= factor * right[i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, size))) / matrix[i][i]
    return right


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step has to compute: prompt chunks and decode rows."""

    num_tokens: int = 0  # of chunks
    token_context: float = 0.0  # sum over the chunks of tokens x (tokens before it + half of its own)
    num_seqs: int = 0  # decode rows
    kv_tokens: int = 0  # tokens that those look back on


class CostModel:
    """One worker's. Steps that mix chunks and decode rows are predicted but fit nothing."""

    def __init__(self) -> None:
        self.prefill = Fit(100.0, 100.0 * 1000.0)
        self.decode = Fit(10.0, 10.0 * 1000.0)
        self.transfer = Fit(1e6)
        self.mixed_error = 0.0

    def step_s(self, shape: StepShape) -> float | None:
        """None: unknown yet."""
        chunks = self.prefill.predict(shape.num_tokens, shape.token_context) if shape.num_tokens else 0.0
        rows = self.decode.predict(shape.num_seqs, shape.kv_tokens) if shape.num_seqs else 0.0
        if chunks is None or rows is None:
            return None
        both = shape.num_tokens and shape.num_seqs
        return chunks + rows - (min(self.prefill.coefficients[0], self.decode.coefficients[0]) if both else 0.0)

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        if shape.num_seqs and shape.num_tokens:
            predicted = self.step_s(shape)
            if predicted is not None and seconds > TINY_S:
                error = abs(predicted - seconds) / seconds
                self.mixed_error = ERROR_MEMORY * self.mixed_error + (1 - ERROR_MEMORY) * error
        elif shape.num_seqs:
            self.decode.observe(seconds, shape.num_seqs, shape.kv_tokens)
        elif shape.num_tokens:
            self.prefill.observe(seconds, shape.num_tokens, shape.token_context)

    def recompute_s(self, num_tokens: int) -> float | None:
        """A prompt of so many tokens, from nothing."""
        return self.prefill.predict(num_tokens, num_tokens * num_tokens / 2)

    def stats(self) -> dict[str, float]:
        """Errors of late, relative, and the fits: for metrics."""
        out = {"error_mixed": self.mixed_error}
        for name, fit in (("prefill", self.prefill), ("decode", self.decode), ("transfer", self.transfer)):
            out[f"error_{name}"] = fit.error
            out.update({f"{name}_{letter}": c for letter, c in zip("abc", fit.coefficients, strict=False)})
        return out
