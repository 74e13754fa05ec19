"""What a worker tells others of itself."""

import socket

import pytest

from shared.addresses import reachable_host, worker_name
from shared.config import WorkerConfig
from shared.errors import ConfigError


def test_a_named_address_is_told_as_it_is():
    """And an advertised one in its place."""
    assert reachable_host(WorkerConfig(host="10.0.0.5")) == "10.0.0.5"
    assert reachable_host(WorkerConfig(host="0.0.0.0", advertise_host="worker.example")) == "worker.example"


class NoSocket:
    """A machine without a network."""

    def __init__(self, *_: object) -> None:
        raise OSError


def test_a_wildcard_is_never_told(monkeypatch: pytest.MonkeyPatch):
    """The machine's own address is, in whatever way it is found, and never its loopback."""
    wildcard = WorkerConfig(host="0.0.0.0")
    named = [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("127.0.1.1", "10.1.2.3")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: named)
    assert reachable_host(wildcard) == "10.1.2.3"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: named[:1])
    monkeypatch.setattr(socket, "socket", NoSocket)
    with pytest.raises(ConfigError, match=r"worker\.advertise_host"):
        reachable_host(wildcard)


def test_workers_of_one_configuration_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """The container's."""
    monkeypatch.setattr(socket, "gethostname", lambda: "4f1c")
    assert worker_name(WorkerConfig()) == "4f1c"
    assert worker_name(WorkerConfig(name="decode-0")) == "decode-0"
