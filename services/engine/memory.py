"""How many KV blocks fit. One memory budget per host, divided among its workers."""

from shared.errors import ConfigError

_MIB = 1 << 20


def plan_num_blocks(
    *,
    free_bytes: int,
    fraction: float,
    share: float,
    weight_bytes: int,
    workspace_bytes: int,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
) -> int:
    """Blocks of a worker's pool: its share of the budget, less weights and workspace.

    :param free_bytes: memory that was free on the host before any worker started.
    :param fraction: of that, what all workers together may take. :param share: this worker's part.
    :raises ConfigError: not even one seq of `max_model_len` tokens fits; the message has the sums.
    """
    budget = int(free_bytes * fraction * share)
    num_blocks = (budget - weight_bytes - workspace_bytes) // block_bytes
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"memory: this worker may take {budget // _MIB} MiB ({free_bytes // _MIB} MiB free x memory_fraction "
            f"{fraction} x memory_share {share}); weights and workspace take "
            f"{(weight_bytes + workspace_bytes) // _MIB} MiB and one seq of {max_model_len} tokens "
            f"{needed * block_bytes // _MIB} MiB. Raise engine.memory_fraction, or lower model.max_model_len or the "
            f"number of workers"
        )
    return num_blocks
