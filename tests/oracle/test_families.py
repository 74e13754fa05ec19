"""Every family of models against `transformers` in float32, from Hugging Face folders and from GGUF files.

The prompt is longer than the sliding windows, so chunks and decode steps cross their border.
"""

from pathlib import Path

import pytest
import torch

from services.engine.checkpoint import open_checkpoint
from services.engine.load import open_model
from services.engine.model import Model, PlainModel
from services.engine.pack_file import load_packed
from services.engine.packed_model import PackedModel
from services.engine.packing_plan import plan_pack
from services.engine.weights import load_weights
from shared.config import EngineConfig, ModelConfig
from tests.oracle.driver import forward, greedy, make_runner, make_seqs
from tests.oracle.families import FAMILIES, IN_GGUF, VOCAB, load_saved, make_model, save, save_gguf
from tests.oracle.oracle import Oracle, first_difference

CLOSE = {"rtol": 1e-4, "atol": 1e-3}
PROMPT = torch.randint(3, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()


def load(path: Path) -> Model:
    return open_model(ModelConfig(path=str(path), dtype="float32"), EngineConfig()).load()


def logits_of(model: Model, token_ids: list[int], chunks: tuple[int, ...]) -> torch.Tensor:
    """Of every position; the prompt in chunks of these sizes, the rest token by token."""
    (seq,) = make_seqs([token_ids], room=0, num_blocks=16)
    runner = make_runner(model, 16)
    for size in (*chunks, *[1] * (len(token_ids) - sum(chunks))):
        forward(model, runner, [(seq, size)])
    return torch.cat(seq.logits)


def check(model: Model, oracle: Oracle) -> None:
    """Logits of a prompt in chunks and of decode steps behind it, and greedy tokens of two seqs side by side."""
    torch.testing.assert_close(logits_of(model, PROMPT, (29, 5, 20)), oracle.logits(PROMPT), **CLOSE)
    prompts = [PROMPT[:40], PROMPT[50:57]]
    answers = greedy(make_runner(model, 16), make_seqs(prompts, room=24, num_blocks=16), 24, 16)
    wants = [oracle.greedy(prompt, 24) for prompt in prompts]
    assert [first_difference(want, answer) for want, answer in zip(wants, answers, strict=True)] == [None, None]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hugging_face_folder_equals_the_oracle(tmp_path: Path, name: str):
    """Packed weights in C++: logits and greedy tokens."""
    source = make_model(name)
    check(load(save(source, tmp_path)), Oracle(source, None))


@pytest.mark.parametrize("name", ["qwen2 sliding", "gemma2 low caps", "gemma3 linear", "smollm3 sliding"])
def test_the_plain_model_equals_the_oracle(tmp_path: Path, name: str):
    """The same without C++."""
    source = make_model(name)
    checkpoint = open_checkpoint(save(source, tmp_path))
    check(PlainModel(checkpoint.spec, load_weights(checkpoint)), Oracle(source, None))


@pytest.mark.parametrize("name", ["gemma2 low caps", "qwen2 sliding"])
def test_the_scalar_body_equals_the_oracle(tmp_path: Path, name: str):
    """C++ without AVX2."""
    source = make_model(name)
    checkpoint = open_checkpoint(save(source, tmp_path))
    plan = plan_pack(checkpoint, "float32")
    check(PackedModel(checkpoint.spec, plan, load_packed(checkpoint, "float32"), simd=False), Oracle(source, None))


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_equals_the_oracle(tmp_path: Path, name: str):
    """Names, order of rows and metadata as llama.cpp has them."""
    source = make_model(name, seed=1)
    check(load(save_gguf(source, IN_GGUF[name], tmp_path / "model.gguf")), Oracle(source, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gemma3", "qwen2"])
def test_half_precision_shards_equal_the_oracle(tmp_path: Path, name: str, dtype: torch.dtype):
    """An index of several files, 16-bit weights."""
    folder = save(make_model(name, seed=2), tmp_path, dtype=dtype, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    want = Oracle(load_saved(folder), None).logits(PROMPT)
    torch.testing.assert_close(logits_of(load(folder), PROMPT, (50,)), want, **CLOSE)


def test_a_window_is_felt(tmp_path: Path):
    """The tests above would miss a window that nobody applies: it changes the oracle's logits, far behind it."""
    source = make_model("mistral")
    narrow = Oracle(source, None).logits(PROMPT)
    source.config.sliding_window = None
    wide = Oracle(source, None).logits(PROMPT)
    torch.testing.assert_close(narrow[:24], wide[:24], **CLOSE)
    assert (narrow[40:] - wide[40:]).abs().amax(dim=-1).min() > 0.1
