"""Which cores each worker gets. Two workers that share cores make each other's thread barriers wait for a
time slice, so every worker has cores of its own as long as there are enough."""

from collections.abc import Sequence

CORES_PER_SERVICE_CORE = 8


def worker_cores(cores: Sequence[int]) -> tuple[int, ...]:
    """The cores that workers are pinned to, of those that the stack may use: of each eight the workers leave one, the
    last ones, to Redis, gateway, scheduler and index. These are not pinned: on a small machine they run beside the
    workers, wherever the kernel finds time."""
    return tuple(cores[: len(cores) - len(cores) // CORES_PER_SERVICE_CORE])


def split_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Cores per worker: disjoint, contiguous and nearly equal runs, the first workers getting the remainder.

    With fewer cores than workers each worker gets one core, shared in turn.
    """
    assert cores
    assert num_workers > 0
    ordered = sorted(cores)
    if len(ordered) < num_workers:
        return [(ordered[i % len(ordered)],) for i in range(num_workers)]
    share, remainder = divmod(len(ordered), num_workers)
    parts: list[tuple[int, ...]] = []
    start = 0
    for i in range(num_workers):
        end = start + share + (1 if i < remainder else 0)
        parts.append(tuple(ordered[start:end]))
        start = end
    return parts


def cores_text(cores: Sequence[int]) -> str:
    """Cores as the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
