"""SentencePiece tokenizers from GGUF, against sentencepiece itself and against transformers' conversion."""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter

from shared.tokenizer import Tokenizer, load_tokenizer

NUM_STRINGS = int(os.environ.get("BATON_TEST_STRINGS", "1500"))
"""10,000 in the long run."""
ROOT = Path(__file__).resolve().parents[4]
ALPHABET = [*"abcdefghijklmnopqrstuvwxyz  \n\t0123456789.,;:!?()[]{}'\"-_/éü漢字🙂\u00a0", "the ", "and", " of", "    "]
ALPHABET += ["\r\n", "blocks ", "Redis", "  the", "▁", "\x00", "<0x41>"]


@dataclass
class Trained:
    """One small model, seen by us, by its own library and by transformers."""

    ours: Tokenizer
    own: Any
    transformers: Any
    prefix: bool  # a space is put before a text


def train(folder: Path, name: str, *, prefix: bool, vocab_size: int = 900) -> Trained:
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(path.read_text() for path in sorted(ROOT.glob("*.md"))))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / name),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=prefix,
        split_digits=True,
        minloglevel=2,
    )
    own: Any = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.model"))
    path = write_gguf(folder / f"{name}.gguf", own, prefix=prefix)
    return Trained(load_tokenizer(path), own, by_transformers(folder / name, own, prefix=prefix), prefix)


def write_gguf(path: Path, own: Any, *, prefix: bool) -> Path:
    """As llama.cpp's converter writes it; nothing is said where the default holds."""
    ids = range(len(own))
    kinds = [2 if own.is_unknown(i) else 3 if own.is_control(i) else 6 if own.is_byte(i) else 1 for i in ids]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([own.id_to_piece(i) for i in ids])
    writer.add_token_scores([own.get_score(i) for i in ids])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(own.bos_id())
    writer.add_eos_token_id(own.eos_id())
    writer.add_unk_token_id(own.unk_id())
    if not prefix:
        writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def by_transformers(folder: Path, own: Any, *, prefix: bool) -> Any:
    """transformers' own conversion of tokenizer.model."""
    from transformers import AutoTokenizer

    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(own.serialized_model_proto())
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_prefix_space": prefix}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With a space put in front, as Llama's and Mistral's; and without, as Gemma's."""
    return train(tmp_path_factory.mktemp("spm"), "small", prefix=request.param)


def strings(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(0, 40))) for _ in range(count)]


def test_random_text_tokenises_as_in_sentencepiece_and_transformers(trained: Trained):
    """Rare characters fall back to bytes; runs of blanks, digits and lines are cut as the model was trained. (Before a
    text that begins with a blank, transformers 5 puts no other, unlike sentencepiece: that is left out.)"""
    for text in strings(NUM_STRINGS, 1):
        ours = trained.ours.encode(text, add_special_tokens=False)
        assert ours == trained.own.encode(text), repr(text)
        if not (trained.prefix and text.startswith((" ", "▁"))):
            assert ours == trained.transformers(text, add_special_tokens=False)["input_ids"], repr(text)


def test_text_comes_back_through_the_detokenizer(trained: Trained):
    """Streamed, token by token, it is what sentencepiece decodes, and the text itself."""
    for text in strings(NUM_STRINGS // 5, 2):
        ids = trained.ours.encode(text, add_special_tokens=False)
        detokenizer = trained.ours.detokenizer()
        streamed = "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])
        assert streamed == trained.ours.decode(ids) == trained.own.decode(ids)
        assert streamed == text.replace("▁", " ")


def test_prompts_begin_with_bos(trained: Trained):
    """The format's default for this kind of tokenizer, where the file says nothing."""
    ids = trained.ours.encode("the", add_special_tokens=True)
    assert ids == [trained.own.bos_id(), *trained.own.encode("the")]
    assert trained.ours.end_token_ids == (trained.own.eos_id(),)


def test_special_tokens_in_text_are_those_tokens(trained: Trained):
    """As in byte-level tokenizers: a rendered template has them."""
    ids = trained.ours.encode("<s>the</s>", add_special_tokens=False)
    assert ids == [trained.own.bos_id(), *trained.own.encode("the"), trained.own.eos_id()]


def test_a_grammar_can_follow_a_byte_fallback_vocabulary(trained: Trained):
    """Masks over pieces and bytes: any text that fits is allowed, character by character of its bytes."""
    import numpy as np

    from shared.grammar import Vocabulary, to_grammar

    matcher = Vocabulary(trained.ours).matcher(to_grammar("regex", "é[0-9]+漢"))
    row = np.zeros(-(-trained.ours.vocab_size // 32), np.uint32)
    text = trained.own.encode("é12漢")
    ids = [i for i in text if trained.own.id_to_piece(i) != "▁"]
    for token in ids:
        matcher.fill(row)
        assert row[token // 32] >> (token % 32) & 1, trained.own.id_to_piece(token)
        matcher.advance([token])
    assert matcher.accepts
