"""Byte-level pre-tokenizers against transformers' own classes of each family, over the default model's vocabulary."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

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
