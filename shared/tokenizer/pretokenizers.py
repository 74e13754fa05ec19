"""How each family of BPE models cuts text before merging, by the name that GGUF files give it.

The regular expressions are facts of the models (their published tokenizer.json says the same); names are
those of llama.cpp's `tokenizer.ggml.pre`.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreType:
    """The parts of a byte-level BPE that differ between families."""

    pre_tokenizer: PreTokenizer
    normalizer: Normalizer | None = None
    ignore_merges: bool = False  # a whole piece that is in the vocabulary is taken as it is
    add_bos: bool = False  # where the file does not say


def pre_type(name: str) -> PreType | None:
    """The rules called `name`, or None if this build does not know them."""
    kind = _KINDS.get(name)
    if kind == "gpt2":
        return PreType(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    if kind == "digits":
        return PreType(_digits_then_gpt2())
    if kind == "llama3":
        return PreType(_split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
    if kind == "qwen2":
        return PreType(_split(r"\p{N}"), normalizer=normalizers.NFC())
    return None


_KINDS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}


def _digits_then_gpt2() -> PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _split(digits: str) -> PreTokenizer:
    pattern = Regex("|".join((_CONTRACTIONS, _LETTERS, digits, _REST)))
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
