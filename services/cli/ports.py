"""Ports: is the public one free, and which private ones are."""

import errno
import socket
from contextlib import ExitStack

from services.cli.errors import CommandError


def check_free(host: str, port: int) -> None:
    """:raises CommandError: nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: old connections do not count
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror:
        raise CommandError(f"--host {host}: there is no such address") from None
    except OSError as exc:
        raise CommandError(_why(exc, host, port)) from None


def _why(exc: OSError, host: str, port: int) -> str:
    if exc.errno == errno.EADDRINUSE:
        return f"port {port} is in use by another program; choose another one with --port"
    if exc.errno == errno.EACCES:
        return f"port {port} needs privileges that you do not have; choose one above 1023 with --port"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: this machine has no such address"
    return f"cannot listen on {host}:{port}: {exc.strerror}"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that were free just now: all held at once, then let go."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]
