"""Random ids, as something handed in, so that a simulation can replay them."""

import random
import secrets
from typing import Protocol


class Randomness(Protocol):
    def token(self, num_bytes: int = 16) -> str:
        """A hex id of `num_bytes` random bytes."""
        ...

    def integer(self, bits: int = 63) -> int:
        """A random non-negative integer below 2**bits."""
        ...

    def uniform(self) -> float:
        """A random number in [0, 1): for jitter, never for secrets."""
        ...


class SystemRandomness:
    """The machine's secure generator."""

    def token(self, num_bytes: int = 16) -> str:
        return secrets.token_hex(num_bytes)

    def integer(self, bits: int = 63) -> int:
        return secrets.randbits(bits)

    def uniform(self) -> float:
        return random.random()


class SeededRandomness:
    """Replayable: for tests and the simulation only."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def token(self, num_bytes: int = 16) -> str:
        return self._rng.randbytes(num_bytes).hex()

    def integer(self, bits: int = 63) -> int:
        return self._rng.getrandbits(bits)

    def uniform(self) -> float:
        return self._rng.random()
