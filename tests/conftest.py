"""Fixtures that every room's tests share."""

import sys
from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer


def pytest_collection_finish() -> None:
    """The oracles compute on one thread: beside the workers of a stack, several would wait for each other at every op,
    and take ten times as long."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis for the session; `redis_url` gives it empty to each test."""
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    redis_server.flush()
    return redis_server.url
