"""SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma), from the pieces and scores that GGUF files hold.

A GGUF file has no merges: SentencePiece joins the neighbours whose joint piece has the best score. As a list of merges,
that is every cut of every piece into two, best score first, which is how Hugging Face converts these models too.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # GGUF token types; 1 = normal, 6 = a byte


def build(meta: dict[str, Any]) -> tuple[tokenizers.Tokenizer, int]:
    """The tokenizer, and how many spaces its decoder drops in front.

    :param meta: `tokenizer.ggml.*`, without the prefix.
    :raises KeyError: a field is missing.
    """
    tokens: list[str] = meta["tokens"]
    kinds: list[int] = meta["token_type"]
    vocab = {text: i for i, text in enumerate(tokens)}
    unknown = tokens[meta.get("unknown_token_id", kinds.index(UNKNOWN) if UNKNOWN in kinds else 0)]
    bpe = models.BPE(
        vocab=vocab,
        merges=merges_of(tokens, meta["scores"], vocab),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(bpe)
    # Where the file says nothing, the format's default holds: text is put behind a space.
    prefix = bool(meta.get("add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Sequence(_decoding(prefix))  # pyright: ignore[reportAttributeAccessIssue]
    for text, kind in zip(tokens, kinds, strict=True):
        # Pieces of blanks are merged like others: a text's blanks are no such pieces before they are normalised.
        if kind in (UNKNOWN, CONTROL):
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif kind == USER_DEFINED and SPACE not in text:
            backend.add_tokens([AddedToken(text, normalized=False, special=False)])
    return backend, int(prefix)


def merges_of(tokens: list[str], scores: list[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Best score first; the cuts of one piece in the order of their parts' ids."""
    ranked: list[tuple[float, int, int, int]] = []
    for index, piece in enumerate(tokens):
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _decoding(prefix: bool) -> list[decoders.Decoder]:
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return [*steps, decoders.Strip(" ", 1, 0)] if prefix else steps
