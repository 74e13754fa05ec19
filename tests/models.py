"""A tiny random Llama on disk: real enough for every process, small enough to start at once."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 64, 128, 4, 2
END, START, PAD = "<|im_end|>", "<|im_start|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGED_WORDS = ("Ġthe", "Ġand", "ing", "Ġof", "Ġto", "er", "on", "Ġin", "assistant", "user", "system")


def make_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    tied: bool = True,
    num_shards: int = 1,
    max_context: int = 1024,
    dtype: str = "float32",
) -> Path:
    """Write `config.json`, safetensors, `tokenizer.json` and `tokenizer_config.json` into `folder`; the same bytes
    for the same arguments. Weights are wide enough that the best token rarely wins by a hair.

    :param dtype: of the stored weights, `float32` or `float16`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    vocab = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": START,
            "eos_token": END,
            "pad_token": PAD,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_context,
        },
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.token_to_id(START),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "dtype": dtype,
    }
    _write_json(folder / "config.json", config)
    weights = _random_weights(seed, num_layers, vocab, tied)
    _write_weights(folder, {name: w.astype(dtype) for name, w in weights.items()}, num_shards)
    return folder


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: the 256 bytes, a few merged words, three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in _MERGED_WORDS:
        left = word[0]
        for char in word[1:]:
            if left + char not in vocab:
                vocab[left + char] = len(vocab)
                merges.append((left, char))
            left += char
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    words = pre_tokenizers.Split(Regex(r" ?[^\s]+|\s"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, PAD])
    return tokenizer


def _random_weights(seed: int, num_layers: int, vocab: int, tied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def scale() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab, HIDDEN, 4.0), "model.norm.weight": scale()}
    if not tied:
        weights["lm_head.weight"] = matrix(vocab, HIDDEN, 4.0)
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = scale()
        weights[at + "post_attention_layernorm.weight"] = scale()
        weights[at + "self_attn.q_proj.weight"] = matrix(HEADS * head_dim, HIDDEN, 2.0)
        weights[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * head_dim, HIDDEN, 2.0)
        weights[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * head_dim, HIDDEN, 2.0)
        weights[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * head_dim, 2.0)
        weights[at + "mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN, 2.0)
        weights[at + "mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN, 2.0)
        weights[at + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE, 2.0)
    return weights


def _write_weights(folder: Path, weights: dict[str, np.ndarray], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = {name: weights[name] for name in names[shard::num_shards]}
        weight_map |= dict.fromkeys(mine, file)
        save_file(mine, folder / file, metadata={"format": "pt"})
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
