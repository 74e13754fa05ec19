"""Stacks that several flow tests share, and the tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.model_path import resolve
from tests.flow.stack import Stack
from tests.models import make_tiny_llama
from tests.oracle.oracle import Oracle, load_oracle


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama on disk."""
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model: Path) -> Oracle:
    return load_oracle(tiny_model)


@pytest.fixture(scope="package")
def pair(tiny_model: Path) -> Iterator[Stack]:
    """One prefill and one decode worker with the tiny model. Whoever uses it leaves it idle."""
    with Stack(prefill=1, decode=1, model__path=tiny_model, engine__num_blocks=400) as stack:
        yield stack


@pytest.fixture(scope="session")
def oracle_default() -> Oracle:
    """`transformers` in fp32 with the embedded model, dequantised by its own code."""
    return load_oracle(resolve(""))
