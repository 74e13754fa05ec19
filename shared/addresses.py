"""What a worker calls itself, and where others reach it."""

import socket

from shared.config import WorkerConfig
from shared.errors import ConfigError

_WILDCARDS = ("", "0.0.0.0", "::")


def worker_name(config: WorkerConfig) -> str:
    """Its name in metrics and logs: unique among containers of one kind, which share their configuration."""
    return config.name or socket.gethostname()


def reachable_host(config: WorkerConfig) -> str:
    """The address that others are told to connect to.

    :raises ConfigError: the worker listens on every address, and the machine's own name has none.
    """
    if config.advertise_host or config.host not in _WILDCARDS:
        return config.advertise_host or config.host
    family = socket.AF_INET6 if config.host == "::" else socket.AF_INET
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(
            f"configuration: worker.host is {config.host!r} and this machine's name has no address ({exc}); "
            "set worker.advertise_host"
        ) from None
    return str(found[0][4][0])
