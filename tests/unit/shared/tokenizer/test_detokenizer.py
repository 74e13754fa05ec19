"""Incremental decoding against the tokenizer's own decoding of everything at once."""

import json
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from shared.errors import ModelError
from shared.tokenizer import Tokenizer
from shared.tokenizer.detokenizer import _BYTE_OF_CHAR, ByteLevelPieces, Pieces, pieces_for


def pieces(source: Tokenizer | Pieces, token_ids: Sequence[int]) -> list[str]:
    """What each push gives, and the flush."""
    detokenizer = source.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def test_random_ids_join_to_the_whole_decoding(tokenizer: Tokenizer):
    """For any ids, special and unknown ones and broken UTF-8 included, nothing is lost, added or changed."""
    any_id = st.integers(0, 49151) | st.integers(0, 300) | st.integers(49152, 60000)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(any_id, max_size=30))
    def check(token_ids: list[int]) -> None:
        assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)

    check()


def test_real_text_comes_back_whole(tokenizer: Tokenizer):
    """Any text that the vocabulary can spell, tokenised and streamed back, is the text."""
    vocab = tokenizer.backend.get_vocab()
    spellable = {byte for char, byte in _BYTE_OF_CHAR.items() if char in vocab}

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=80))
    def check(text: str) -> None:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        shown = all(token_id > 16 for token_id in token_ids)  # text that spells a special token is not
        if shown and set(text.encode()) <= spellable:
            assert "".join(pieces(tokenizer, token_ids)) == text

    check()


def test_a_character_of_several_tokens_comes_out_whole(tokenizer: Tokenizer):
    """No piece ends inside a character, and no replacement character appears."""
    text = "a 🦜 𓂀 漢 b"
    out = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out)
    assert any(piece == "" for piece in out[:-1]), "the sample has no character of several tokens"


def test_a_broken_end_is_flushed_as_replacement(tokenizer: Tokenizer):
    """Output that ends inside a character shows U+FFFD, once it is certain that nothing follows."""
    token_ids = tokenizer.encode("🦜", add_special_tokens=False)[:-1]
    assert pieces(tokenizer, token_ids) == ["" for _ in token_ids] + ["\ufffd"]


def test_special_tokens_are_not_shown_but_other_added_ones_are(tokenizer: Tokenizer):
    """An added token is plain text, not the byte alphabet, even where a space is in it."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken("<my tag é>", special=False)])
    new = backend.token_to_id("<my tag é>")
    assert pieces(ByteLevelPieces(backend), [1, new, 2]) == ["", "<my tag é>", "", ""]


SENTENCE_VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
SENTENCE_VOCAB |= {text: 259 + i for i, text in enumerate(["▁", "▁he", "llo", "▁▁", "é", "漢", "a"])}


@pytest.mark.parametrize("strip", [0, 1])
def test_sentencepiece_ids_join_to_the_whole_decoding(strip: int):
    """Byte-fallback runs, good and bad, and the leading space: as the library decides on the whole."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=SENTENCE_VOCAB, merges=[], byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", strip, 0))
    backend.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    source = pieces_for(backend, json.loads(backend.to_str())["decoder"], where="test")

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, 265) | st.sampled_from([1, 3 + 0xC3, 3 + 0xA9, 259, 260, 262]), max_size=20))
    def check(token_ids: list[int]) -> None:
        assert "".join(pieces(source, token_ids)) == backend.decode(token_ids, skip_special_tokens=True)

    check()


def test_an_unknown_decoder_is_named():
    """A tokenizer that would be shown wrongly is refused at boot."""
    backend = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(ModelError, match="WordPiece"):
        pieces_for(backend, {"type": "WordPiece"}, where="tokenizer.json")
    with pytest.raises(ModelError, match="None"):
        pieces_for(backend, None, where="tokenizer.json")
