"""8-bit KV, its scales included, goes from prefill to decode; and a family with windows and two RoPEs does.

The oracle is the engine in this process, alone: with batch invariance a handed-off answer has its very tokens.
"""

from pathlib import Path

import pytest

from services.engine.load import open_model
from services.engine.model_spec import KVDtype
from shared.config import EngineConfig, ModelConfig
from tests.flow.stack import Stack
from tests.flow.test_matrix import ask_all, check_accounts
from tests.models import make_tiny_llama, make_tokenizer
from tests.oracle.driver import greedy, make_runner, make_seqs
from tests.oracle.families import make_model, save

pytestmark = [pytest.mark.anyio, pytest.mark.flow]
NUM_TOKENS = 24


def engine_alone(path: Path, kv_dtype: KVDtype, asked: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    model = open_model(ModelConfig(path=str(path), kv_dtype=kv_dtype), EngineConfig()).load()
    runner = make_runner(model, 64, kv_dtype=kv_dtype)
    seqs = make_seqs(list(asked.values()), room=NUM_TOKENS, num_blocks=64)
    return dict(zip(asked, greedy(runner, seqs, NUM_TOKENS, 33), strict=True))


def a_gemma3(folder: Path) -> Path:
    """With the tiny model's tokenizer, so that the gateway can serve it."""
    save(make_model("gemma3"), folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("family", "kv_dtype", "transport"),
    [("llama", "int8", "shm"), ("gemma3", "fp8", "tcp")],
)
async def test_a_handed_off_answer_is_the_engines_own(tmp_path: Path, family: str, kv_dtype: KVDtype, transport: str):
    """Prompts of all lengths at once, prefilled there and decoded here: the tokens of one engine alone."""
    path = a_gemma3(tmp_path) if family == "gemma3" else make_tiny_llama(tmp_path)
    asked = {f"{n} tokens": [3 + (7 * i + n) % 250 for i in range(n)] for n in (18, 40, 64, 97)}
    settings = {"model__path": path, "model__dtype": "auto", "model__kv_dtype": kv_dtype}
    with Stack(transfer__transports=transport, engine__num_blocks=200, **settings) as stack:
        answers = await ask_all(stack, asked, NUM_TOKENS)
        check_accounts(stack, 1, transport)
        stack.wait_idle()
    assert {name: tuple(answer["tokens"]) for name, answer in answers.items()} == engine_alone(path, kv_dtype, asked)
