"""A `transformers` Llama and tokenizer from a GGUF file, by way of the `gguf` package.

`transformers` can do this itself, in 50 seconds and with a further dependency; the results were compared once.
"""

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a Llama whose tokenizer is SmolLM's."""
    reader = gguf.GGUFReader(path)
    field = {key: value.contents() for key, value in reader.fields.items() if key.startswith(("llama.", "tokenizer."))}
    config = _config(field)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {_name(t.name): _tensor(t, config) for t in reader.tensors}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were made on `meta`
    return model, _tokenizer(field)


def _config(field: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )


def _name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
    return f"{_NAMES[parts[0]]}.weight"


def _tensor(tensor: Any, config: transformers.LlamaConfig) -> torch.Tensor:
    weights = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    kind = tensor.name.split(".")[-2]
    if kind in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
        head_dim = len(weights) // heads
        # Row 2i of a head in the file is row i of Hugging Face's; row 2i + 1 is row i + head_dim / 2.
        in_head = [2 * (i % (head_dim // 2)) + i // (head_dim // 2) for i in range(head_dim)]
        weights = weights[[head * head_dim + row for head in range(heads) for row in in_head]]
    return weights


def _tokenizer(field: dict[str, Any]) -> Any:
    tokens = field["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, field["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens(special)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = field["tokenizer.chat_template"]
    return fast
