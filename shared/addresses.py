"""What a worker calls itself, and where others reach it."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress

from shared.config import WorkerConfig
from shared.errors import ConfigError

_WILDCARDS = ("", "0.0.0.0", "::")
_ELSEWHERE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Addresses for documentation (RFC 5737, RFC 3849)."""


def worker_name(config: WorkerConfig) -> str:
    """Its name in metrics and logs: unique among containers of one kind, which share their configuration."""
    return config.name or socket.gethostname()


def reachable_host(config: WorkerConfig) -> str:
    """The address that others are told to connect to.

    :raises ConfigError: the worker listens on every address, and the machine has none that others could reach.
    """
    if config.advertise_host or config.host not in _WILDCARDS:
        return config.advertise_host or config.host
    family = socket.AF_INET6 if config.host == "::" else socket.AF_INET
    found = next((a for a in _own_addresses(family) if not ipaddress.ip_address(a).is_loopback), None)
    if found is None:
        raise ConfigError(
            f"configuration: worker.host is {config.host!r} and this machine has no other address than its loopback; "
            "set worker.advertise_host"
        )
    return found


def _own_addresses(family: socket.AddressFamily) -> Iterator[str]:
    """The address of the machine's name (for a container its own, on some systems a loopback one), then the one that
    packets leave from."""
    with suppress(OSError):
        yield from (str(a[4][0]) for a in socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM))
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE[family])  # sends nothing
        yield probe.getsockname()[0]
