"""The real model, once in the oracle and once in ours."""

import pytest

from services.engine.load import open_model
from services.engine.model import Model
from shared.config import EngineConfig, ModelConfig
from shared.model_path import resolve
from tests.oracle.oracle import Oracle, load_oracle


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """`transformers` with the default model."""
    return load_oracle(resolve(""))


@pytest.fixture(scope="session")
def model() -> Model:
    """Ours with the default model, the exact path."""
    return open_model(ModelConfig(dtype="float32"), EngineConfig()).load()
