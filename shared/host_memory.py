"""How much memory this machine, or this container, can still give."""

from pathlib import Path

from shared.errors import ConfigError


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that new processes can have: the kernel's estimate, or what the container's limit leaves if less.

    :param root: holds `proc` and `sys` (tests).
    :raises ConfigError: the kernel does not tell; the number of blocks must then be configured.
    """
    available = _meminfo_available(root / "proc/meminfo")
    limits = [_cgroup2_free(root / "sys/fs/cgroup"), _cgroup1_free(root / "sys/fs/cgroup/memory")]
    known = [value for value in (available, *limits) if value is not None]
    if not known:
        raise ConfigError("memory: cannot read how much is free; set engine.num_blocks")
    return max(0, min(known))


def _meminfo_available(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup2_free(folder: Path) -> int | None:
    return _limit_less_used(folder / "memory.max", folder / "memory.current", folder / "memory.stat")


def _cgroup1_free(folder: Path) -> int | None:
    return _limit_less_used(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", folder / "memory.stat")


def _limit_less_used(limit_file: Path, used_file: Path, stat_file: Path) -> int | None:
    """What a cgroup may still take; clean file pages count as free. None: no limit."""
    limit, used = _lines(limit_file), _lines(used_file)
    if not limit or not used or limit[0] == "max":
        return None
    files = [
        line.split()[1] for line in _lines(stat_file) if line.startswith(("inactive_file ", "total_inactive_file "))
    ]
    return int(limit[0]) - int(used[0]) + max((int(f) for f in files), default=0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
