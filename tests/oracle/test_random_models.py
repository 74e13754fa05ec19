"""Random two-layer models in safetensors, written by this project or by `transformers`, against the oracle."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.checkpoint import open_checkpoint
from services.engine.load import open_model
from shared.config import EngineConfig, ModelConfig
from tests.models import make_tiny_llama
from tests.oracle.driver import forward, greedy, make_runner, make_seqs
from tests.oracle.oracle import Oracle, first_difference, load_oracle


def logits_of(folder: Path, token_ids: list[int], chunk: int) -> torch.Tensor:
    model = open_model(ModelConfig(path=str(folder), dtype="float32"), EngineConfig()).load()
    runner = make_runner(model, 16)
    (seq,) = make_seqs([token_ids], room=0, num_blocks=16)
    while seq.done < len(token_ids):
        forward(model, runner, [(seq, min(chunk, len(token_ids) - seq.done))])
    return torch.cat(seq.logits)


@pytest.mark.parametrize(
    "form",
    [{"tied": True}, {"tied": False}, {"tied": False, "num_shards": 3}, {"tied": True, "dtype": "float16"}],
    ids=["tied", "untied", "sharded", "float16"],
)
def test_tiny_model_equals_the_oracle(tmp_path: Path, form):
    """Logits of every position, for each way that weights may be stored."""
    folder = make_tiny_llama(tmp_path / "tiny", **form)
    oracle = load_oracle(folder)
    token_ids = oracle.encode("user and assistant of the system, going to 🌈 town in the morning " * 3)
    torch.testing.assert_close(logits_of(folder, token_ids, 29), oracle.logits(token_ids), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_model_written_by_transformers(tmp_path: Path, kv_heads: int, head_dim: int):
    """Every grouping of heads, and a head dim that is not hidden / heads; bfloat16 shards as the hub has them."""
    import transformers

    torch.manual_seed(kv_heads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(
            vocab_size=300,
            hidden_size=96,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            initializer_range=0.3,
        )
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path, max_shard_size="150KB")
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    token_ids = torch.randint(300, (70,)).tolist()
    want = Oracle(saved, None).logits(token_ids)
    torch.testing.assert_close(logits_of(tmp_path, token_ids, 32), want, rtol=1e-4, atol=1e-3)


def test_greedy_tokens_of_the_tiny_model(tmp_path: Path):
    """The topology tests' model says the same as the oracle, and wins by clear margins."""
    folder = make_tiny_llama(tmp_path / "tiny")
    oracle = load_oracle(folder)
    model = open_model(ModelConfig(path=str(folder), dtype="float32"), EngineConfig()).load()
    prompts = [oracle.encode(text) for text in ("a", "the user and", "town " * 30)]
    seqs = make_seqs(prompts, room=40, num_blocks=32)
    answers = greedy(make_runner(model, 32), seqs, 40, 16)
    wants = [oracle.greedy(prompt, 40) for prompt in prompts]
    assert [first_difference(want, answer) for want, answer in zip(wants, answers, strict=True)] == [None] * 3
    margins = sorted(m for want in wants for m in want.margins)
    assert margins[len(margins) // 10] > 0.01


def test_digest_tells_models_apart(tmp_path: Path):
    """Equal files have equal digests wherever they lie; another seed, one changed weight, another config do not."""
    first = open_checkpoint(make_tiny_llama(tmp_path / "a")).spec
    assert open_checkpoint(make_tiny_llama(tmp_path / "b")).spec.digest == first.digest
    others = [make_tiny_llama(tmp_path / "c", seed=1), make_tiny_llama(tmp_path / "d", max_context=512)]
    changed = make_tiny_llama(tmp_path / "e")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    digests = {first.digest, *(open_checkpoint(folder).spec.digest for folder in [*others, changed])}
    assert len(digests) == 4
