"""Safetensors folders that this build must refuse, each by name. What it accepts is in tests/oracle."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.checkpoint import open_checkpoint
from services.engine.load import open_model
from services.engine.weights import load_weights
from shared.config import EngineConfig, ModelConfig
from shared.errors import ConfigError, ModelError
from tests.models import make_tiny_llama


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2'"),
        ({"model_type": "gemma3"}, "architecture 'gemma3' is not known"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "RoPE scaling 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "RoPE scaling 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE parameter factor must be a number above 0, not None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "RoPE of a part of each head"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["conv"] * 2},
            "'conv'",
        ),
        ({"model_type": "qwen2"}, "tensor model.layers.0.self_attn.k_proj.bias is missing"),
        ({"model_type": "qwen3", "head_dim": 16}, "tensor model.layers.0.self_attn.k_norm.weight is missing"),
        ({"model_type": "gemma3_text", "head_dim": 16}, "hidden_act = 'silu'|post_feedforward|pre_feedforward"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers must be a list of 2"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 KV heads"),
        ({"head_dim": 15}, "heads of 15 numbers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_size": "64"}, "hidden_size must be a number"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.* is not part"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
    ],
)
def test_an_unknown_model_is_refused_by_name(tmp_path: Path, changes, message: str):
    """The error names the field or the tensor."""
    edit_config(make_tiny_llama(tmp_path), **changes)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_of_the_wrong_shape_is_refused(tmp_path: Path):
    """The error has both shapes."""
    edit_config(make_tiny_llama(tmp_path), intermediate_size=100)
    with pytest.raises(ModelError, match=r"gate_proj.weight is \(128, 64\), expected \(100, 64\)"):
        load_weights(open_checkpoint(tmp_path))


def test_a_tensor_of_an_unknown_type_is_refused(tmp_path: Path):
    """Integers are no weights."""
    weights = load_file(make_tiny_llama(tmp_path) / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"norm\.weight has type torch\.int8"):
        load_weights(open_checkpoint(tmp_path))


def test_missing_and_damaged_files_are_refused(tmp_path: Path):
    """A lost shard, a cut file, a broken config."""
    sharded = make_tiny_llama(tmp_path / "sharded", num_shards=2)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors is missing"):
        open_checkpoint(sharded)
    cut = make_tiny_llama(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cut/model\.safetensors"):
        open_checkpoint(cut)
    broken = make_tiny_llama(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(broken)


def test_a_longer_context_than_the_model_has_is_refused(tmp_path: Path):
    """`max_model_len` may shorten the model's own limit, not stretch it."""
    folder = str(make_tiny_llama(tmp_path, max_context=256))
    assert open_model(ModelConfig(path=folder), EngineConfig()).max_model_len == 256
    assert open_model(ModelConfig(path=folder, max_model_len=100), EngineConfig()).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len 257"):
        open_model(ModelConfig(path=folder, max_model_len=257), EngineConfig())
