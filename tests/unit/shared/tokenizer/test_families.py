"""Byte-level pre-tokenizers against transformers' own classes of each family, over the default model's vocabulary."""

import os
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from shared.gguf_header import read_metadata
from shared.model_path import resolve
from tests.unit.shared.tokenizer.test_tokenizer import tiny, with_digit_rule

NUM_STRINGS = int(os.environ.get("BATON_TEST_STRINGS", "400"))
"""10,000 in the long run."""
ALPHABET = [
    *"abcdTHEst's  \n\r\t0123456789.,;:!?()[]{}\"-_/éü漢字🙂\u00a0ßÅ½٣",
    "the ",
    " and",
    "I'll",
    "'RE",
    "    ",
    "\n\n",
]
ALPHABET += ["e\u0301", "\r\n", "==", " 7", "function(", "x86", "\u2028"]


def strings(seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(0, 40))) for _ in range(NUM_STRINGS)]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    meta = read_metadata(resolve(""))
    vocab = {text: i for i, text in enumerate(meta["tokenizer.ggml.tokens"])}
    return vocab, [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]


def of_transformers(pre: str) -> Any:
    """The backend of the family's class."""
    import transformers

    if pre == "smollm":
        path = resolve("")
        return with_digit_rule(transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    kind = {"gpt-2": transformers.GPT2Tokenizer, "qwen2": transformers.Qwen2Tokenizer}[pre]
    vocab, merges = vocabulary()
    return kind(vocab=vocab, merges=merges).backend_tokenizer


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2"])
def test_random_text_tokenises_as_in_transformers(tmp_path: Path, pre: str):
    """Words, digits, blanks, other scripts, composed and decomposed characters."""
    ours, theirs = tiny(tmp_path, pre=pre, add_bos_token=False), of_transformers(pre)
    for text in strings(9):
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == want, repr(text)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Llama 3's own `tokenizer.py` has it."""


def test_llama_bpe_tokenises_as_tiktoken_and_transformers(tmp_path: Path):
    """Llama 3 is published as ranks for tiktoken, from which transformers makes its tokenizer. Ours, from a GGUF file
    of these merges, equals both, over the default model's vocabulary taken as ranks."""
    vocab, _ = vocabulary()
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    ranks = {bytes(byte_of[c] for c in text): i for text, i in vocab.items() if not text.startswith("<|") and i > 16}
    missing = [bytes([byte]) for byte in range(256) if bytes([byte]) not in ranks]
    ranks |= {byte: len(vocab) + i for i, byte in enumerate(missing)}
    lines = [f"{b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (tmp_path / "ranks.tiktoken").write_text("\n".join(lines))
    converter = TikTokenConverter(str(tmp_path / "ranks.tiktoken"))
    names, merges = converter.extract_vocab_merges_from_model(str(tmp_path / "ranks.tiktoken"))
    tokens = [f"<unused{i}>" for i in range(max(ranks.values()) + 1)]
    for name, rank in names.items():
        tokens[rank] = name
    kinds = [1 if token in names else 5 for token in tokens]
    ours = tiny(
        tmp_path,
        pre="llama-bpe",
        add_bos_token=False,
        tokens=tokens,
        token_type=kinds,
        merges=[" ".join(pair) for pair in merges],
    )
    theirs = converter.converted()
    metas = tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    for text in strings(10):
        got = ours.encode(text, add_special_tokens=False)
        assert got == theirs.encode(text, add_special_tokens=False).ids == metas.encode_ordinary(text), repr(text)
