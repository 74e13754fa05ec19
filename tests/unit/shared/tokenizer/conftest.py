"""The default model's tokenizer."""

import pytest

from shared.model_path import resolve
from shared.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(""))
