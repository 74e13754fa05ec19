"""How many KV blocks fit. One memory budget per host, divided among its workers."""

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.host_memory import parse_bytes

_MIB = 1 << 20
LEAVE = 0.05
"""Part of the free memory that a limit cannot claim either: the other services live there."""
PARK_SHARE = 1 / 8
"""Of what is left for KV, at most so much is for parked blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory of a host, and one worker's part of it."""

    free_bytes: int  # before any worker started
    fraction: float  # of that, for all workers together
    limit: str = ""  # in place of the fraction
    share: float = 1.0  # this worker's part

    @property
    def total_bytes(self) -> int:
        """For all workers together."""
        if self.limit:
            return min(parse_bytes(self.limit), int(self.free_bytes * (1 - LEAVE)))
        return int(self.free_bytes * self.fraction)

    def __str__(self) -> str:
        rule = f"memory_limit {self.limit}" if self.limit else f"memory_fraction {self.fraction}"
        return f"{rule} of {self.free_bytes // _MIB} MiB free, for {round(1 / self.share)} workers"


@dataclass(frozen=True, slots=True)
class Pool:
    """What a worker makes of its part."""

    num_blocks: int
    num_bays: int  # blocks that can be parked beside them


def plan_pool(
    budget: Budget,
    *,
    shared_bytes: int,
    own_bytes: int,
    park_bytes: int,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
) -> Pool:
    """A worker's pool: its share of the budget, less what it needs besides.

    :param shared_bytes: weights that all workers map, counted once per host. :param own_bytes: weights and workspace
        of each worker's own. :param park_bytes: room for parked blocks, at most.
    :raises ConfigError: not even one seq of `max_model_len` tokens fits; the message has the sums.
    """
    kv_bytes = int((budget.total_bytes - shared_bytes) * budget.share) - own_bytes
    needed = -(-max_model_len // block_size)
    spare_bytes = kv_bytes - needed * block_bytes
    num_bays = max(0, min(park_bytes, int(kv_bytes * PARK_SHARE), spare_bytes)) // block_bytes
    num_blocks = kv_bytes // block_bytes - num_bays
    if num_blocks < needed:
        fits = max(0, num_blocks) * block_size
        raise ConfigError(
            f"memory: {budget}: {max(0, kv_bytes) // _MIB} MiB are left for the KV cache of this worker (weights take "
            f"{(shared_bytes + own_bytes) // _MIB} MiB, workspace included), which is {fits} tokens; one sequence of "
            f"{max_model_len} tokens needs {needed * block_bytes // _MIB} MiB. Raise --memory-fraction or "
            f"--memory-limit, start fewer workers, or lower model.max_model_len"
            + (f" to {fits} or less" if fits else "")
        )
    return Pool(num_blocks, num_bays)
