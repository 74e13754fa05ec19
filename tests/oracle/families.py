"""Tiny random models of every family that the engine knows, written by `transformers`; and the same as GGUF files."""

import math
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

VOCAB, MAX_CONTEXT, WINDOW = 320, 512, 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama llama3": ("Llama", {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 64}}),
    "llama yarn": ("Llama", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 24}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": _YARN | {"rope_theta": 1e6}}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}),
    "gemma2 low caps": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}),
    "gemma3 linear": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": _LOCAL,
            },
        },
    ),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "smollm3 sliding": ("SmolLM3", {"use_sliding_window": True, "sliding_window": WINDOW}),
}
"""By name: the prefix of the config's class, and its fields. Layers: enough for each kind of layer to occur."""

IN_GGUF = {
    "llama linear": "llama",
    "llama llama3": "llama",
    "llama yarn": "llama",
    "mistral without a window": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3 yarn": "qwen3",
    "gemma2": "gemma2",
    "gemma2 low caps": "gemma2",
    "gemma3": "gemma3",
    "gemma3 linear": "gemma3",
    "smollm3": "smollm3",
}
"""Those that llama.cpp defines, with the name it gives them."""

_NUM_LAYERS = {"SmolLM3": 5, "Gemma3Text": 7, "Gemma2": 3}


def make_model(name: str, seed: int = 0) -> Any:
    """The family's model in float32, all of whose weights matter: norms and biases are random too."""
    import transformers

    prefix, fields = FAMILIES[name]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        config = getattr(transformers, f"{prefix}Config")(
            **_COMMON | {"num_hidden_layers": _NUM_LAYERS.get(prefix, 3)} | fields
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("norm.weight", ".bias")):
                weight += 0.2 * torch.randn_like(weight)
    return model


def save(model: Any, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
    """`save_pretrained`, in the given type, which the model then has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load_saved(folder: Path) -> Any:
    """What `transformers` reads back, in float32."""
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_GEMMA_NAMES = _GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def save_gguf(
    model: Any, architecture: str, path: Path, kinds: dict[str, gguf.GGMLQuantizationType] | None = None
) -> Path:
    """The model as llama.cpp's converter would write it.

    :param kinds: types of tensors, by the last part of their name, in place of float32.
    """
    config, gemma = model.config, architecture.startswith("gemma")
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config, architecture)
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        *parents, last, suffix = key.split(".")
        name = (_GEMMA_NAMES if gemma else _GGUF_NAMES)[last]
        values = weight.numpy() + 1 if gemma and last.endswith("norm") else weight.numpy()
        if architecture in ("llama", "smollm3") and last in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if last == "q_proj" else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        label = f"blk.{parents[2]}.{name}" if "layers" in parents else name
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        data = values if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{label}.{suffix}", np.ascontiguousarray(data), raw_dtype=kind)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _llama3_factors(config: Any) -> np.ndarray:
    """What llama3's scaling divides each frequency by, one after the other."""
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    factors = []
    for i in range(head_dim // 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-2 * i / head_dim) / (2 * math.pi)
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
