"""`config.json` as the hub has it, in the older form too: windows and RoPE are what `transformers` makes of it."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.hf_config import read_spec
from services.engine.model_spec import LayerSpec, Rope

_SIZES = {"vocab_size": 1000, "intermediate_size": 512, "rms_norm_eps": 1e-6}
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
LLAMA_3_2_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
}
QWEN_2_5_YARN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "sliding_window": 32768,
    "max_window_layers": 21,
    "use_sliding_window": False,
}
MISTRAL_7B_V0_1 = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}


def spec_of(folder: Path, config: dict[str, Any]):
    (folder / "config.json").write_text(json.dumps(_SIZES | config))
    return read_spec(folder, "digest")


def rotations_of(config: dict[str, Any], layer_type: str | None = None) -> tuple[torch.Tensor, float]:
    """Frequencies and scale by `transformers`."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = transformers.AutoConfig.for_model(**_SIZES | config)
    params = known.rope_parameters[layer_type] if layer_type else known.rope_parameters
    if params["rope_type"] == "default":
        dim = known.head_dim
        return 1.0 / params["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim), 1.0
    return ROPE_INIT_FUNCTIONS[params["rope_type"]](known, torch.device("cpu"), layer_type=layer_type)


def check_rope(rope: Rope, want: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(torch.tensor(rope.inverse_frequencies), want[0], rtol=1e-6, atol=0)
    assert rope.scale == pytest.approx(want[1])


@pytest.mark.parametrize("config", [LLAMA_3_2_1B, QWEN_2_5_YARN], ids=["llama3", "yarn"])
def test_scaled_rope_of_the_older_form(tmp_path: Path, config: dict[str, Any]):
    """`rope_scaling` beside `rope_theta`; every layer sees everything."""
    spec = spec_of(tmp_path, config)
    (rope,) = spec.ropes
    check_rope(rope, rotations_of(config))
    assert set(spec.layers) == {LayerSpec()}


def test_yarn_stretches_the_context(tmp_path: Path):
    """What the file says is the first training's; without scaling it is the limit."""
    assert spec_of(tmp_path, QWEN_2_5_YARN).max_context == 4 * 32768
    assert spec_of(tmp_path, QWEN_2_5_YARN | {"rope_scaling": None}).max_context == 32768
    assert spec_of(tmp_path, LLAMA_3_2_1B).max_context == 131072


def test_gemma_3_turns_local_layers_by_their_own_base(tmp_path: Path):
    """Five layers with a window, then one without; scaling is for the latter alone."""
    spec = spec_of(tmp_path, GEMMA_3_1B)
    assert [layer.window for layer in spec.layers[:7]] == [512] * 5 + [0, 512]
    assert all(layer.rope == (1 if layer.window else 0) for layer in spec.layers)
    check_rope(spec.ropes[0], rotations_of(GEMMA_3_1B, "full_attention"))
    check_rope(spec.ropes[1], rotations_of(GEMMA_3_1B, "sliding_attention"))
    scaled = GEMMA_3_1B | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    again = spec_of(tmp_path, scaled)
    check_rope(again.ropes[0], rotations_of(scaled, "full_attention"))
    assert again.ropes[0] != spec.ropes[0]
    assert again.ropes[1] == spec.ropes[1]
    assert (spec.embed_scale, spec.attention_scale, spec.tied_embeddings) == (1152**0.5, 1 / 16, True)


def test_mistral_has_a_window_in_every_layer(tmp_path: Path):
    """Unless the field is null, as in its later versions."""
    assert {layer.window for layer in spec_of(tmp_path, MISTRAL_7B_V0_1).layers} == {4096}
    assert {layer.window for layer in spec_of(tmp_path, MISTRAL_7B_V0_1 | {"sliding_window": None}).layers} == {0}


def test_qwen_windows_begin_where_the_file_says(tmp_path: Path):
    """Only with `use_sliding_window`."""
    layers = spec_of(tmp_path, QWEN_2_5_YARN | {"use_sliding_window": True}).layers
    assert [layer.window for layer in layers] == [0] * 21 + [32768] * 3
