"""What a worker tells others of itself."""

import ipaddress
import socket

import pytest

from shared.addresses import reachable_host, worker_name
from shared.config import WorkerConfig
from shared.errors import ConfigError


def test_a_named_address_is_told_as_it_is():
    """And an advertised one in its place."""
    assert reachable_host(WorkerConfig(host="10.0.0.5")) == "10.0.0.5"
    assert reachable_host(WorkerConfig(host="0.0.0.0", advertise_host="worker.example")) == "worker.example"


def test_a_wildcard_is_never_told(monkeypatch: pytest.MonkeyPatch):
    """The machine's own address is; without one, the start ends with what to set."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert ipaddress.ip_address(reachable_host(WorkerConfig(host="0.0.0.0"))).is_loopback
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    with pytest.raises(ConfigError, match=r"worker\.advertise_host"):
        reachable_host(WorkerConfig(host="0.0.0.0"))


def test_workers_of_one_configuration_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """The container's."""
    monkeypatch.setattr(socket, "gethostname", lambda: "4f1c")
    assert worker_name(WorkerConfig()) == "4f1c"
    assert worker_name(WorkerConfig(name="decode-0")) == "decode-0"
