"""How much memory and how many cores this machine, or this container, can still give."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.errors import ConfigError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_bytes(text: str) -> int:
    """`4GiB`, `500M`, `1073741824` -> bytes.

    :raises ConfigError: not a size, or none above 0.
    """
    number = text.strip().lower().removesuffix("b")
    unit = number.lstrip("0123456789. ")
    try:
        value = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value <= 0:
        raise ConfigError(f"memory: {text!r} is not a size like 4GiB or 500MB")
    return value


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that new processes can have: the kernel's estimate, or what a limit of this process's control groups, or
    of one above them, leaves if less.

    :param root: holds `proc` and `sys` (tests).
    :raises ConfigError: the kernel does not tell; the number of blocks must then be configured.
    """
    known = [_meminfo_available(root / "proc/meminfo")]
    known += [_cgroup2_free(folder) for folder in cgroups(root, "")]
    known += [_cgroup1_free(folder) for folder in cgroups(root, "memory")]
    told = [value for value in known if value is not None]
    if not told:
        raise ConfigError("memory: cannot read how much is free; set engine.num_blocks")
    return max(0, min(told))


def usable_cores(affinity: Iterable[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Cores that this process may use, in order: of those that it may run on (a cpuset is in `affinity`) as many as the
    CPU time of its control groups is worth, at least one."""
    cores = sorted(affinity)
    quotas = [_quota(_words(folder / "cpu.max")) for folder in cgroups(root, "")]
    for folder in cgroups(root, "cpu"):
        quotas.append(_quota(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")))
    told = [quota for quota in quotas if quota is not None]
    return tuple(cores[: max(1, round(min(told)))] if told else cores)


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those above it, the topmost first. "" is version 2's."""
    top = root / "sys/fs/cgroup" / controller
    yield top
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            for part in Path(path).parts[1:]:
                top = top / part
                yield top


def _quota(words: list[str]) -> float | None:
    """Cores' worth of time per period; None: unlimited."""
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


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
