"""Masks of grammars: against the JSON parser, and the same however a seq came to where it is."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from services.engine.grammars import Grammars
from services.engine.sampler import AllowedTokens
from services.engine.types import SampleSpec, SeqId
from shared.errors import GrammarError
from shared.grammar import SpelledTokens, Vocabulary, json_grammar, to_grammar
from shared.messages import SamplingParams
from shared.model_path import resolve
from shared.offload import InlineOffload
from shared.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(""))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(lambda: vocabulary, InlineOffload(), max_seqs=8)


def spec(grammar: str, output: list[int]) -> SampleSpec:
    sampling = SamplingParams(max_tokens=100, grammar=grammar)
    return SampleSpec(sampling, 0, len(PROMPT) + len(output), [*PROMPT, *output], len(PROMPT))


def allowed_ids(row: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def masks(grammars: Grammars, *wanted: tuple[str, SampleSpec]) -> AllowedTokens:
    allowed, broken = grammars.masks([(SeqId(name), s) for name, s in wanted])
    assert not broken
    assert allowed is not None
    return allowed


def walk(grammars: Grammars, grammar: str, tokenizer: Tokenizer, seed: int) -> list[int]:
    """An output chosen at random from the masks, up to the end token."""
    rng, output = random.Random(seed), []
    while not output or output[-1] not in tokenizer.end_token_ids:
        output.append(rng.choice(allowed_ids(masks(grammars, (f"w{seed}", spec(grammar, output)))[0])))
        assert len(output) < 400
    return output


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("choice", '["<|im_start|>x"]'),
        ("choice", '["<|im_end|>"]'),
        ("json_schema", '{"const": "a<|im_start|>b<|endoftext|>"}'),
        ("regex", r"a<\|im_(start|end)\|>[<|>a-z_]{3}"),
    ],
)
def test_the_text_of_a_special_token_is_spelled_by_ordinary_tokens(
    vocabulary: Vocabulary, tokenizer: Tokenizer, kind: Any, text: str
):
    """The token itself would not be shown, or would end the answer: only a true end allows it."""
    rng = random.Random(3)
    for _ in range(5):
        matcher, output = vocabulary.matcher(to_grammar(kind, text)), []
        while not matcher.is_over:
            row = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
            matcher.fill(row)
            ids = [i for i in allowed_ids(row) if i not in tokenizer.end_token_ids or not matcher.accepts]
            assert not [i for i in ids if tokenizer.special_id(tokenizer.token_bytes(i).decode(errors="replace"))]
            output.append(rng.choice(ids))
            matcher.advance(output[-1:])
        shown = tokenizer.decode(output)
        if kind == "regex":
            assert re.fullmatch(text, shown)
        else:
            value = json.loads(text)
            assert shown == (value[0] if kind == "choice" else json.dumps(value["const"]))


@pytest.mark.parametrize("prefix", [False, True])
def test_bytes_that_a_grammar_forces_become_tokens_of_just_these_bytes(tokenizer: Tokenizer, prefix: bool):
    """Also where the tokenizer puts a blank before its text, and in the middle of a character."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if prefix:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore[reportAttributeAccessIssue]
    tokens = SpelledTokens(replace(tokenizer, backend=backend), tokenizer.end_token_ids, tokenizer.vocab_size)
    for text in ("", "hello world", " x", "<|im_end|>", "é漢", "\x02a", '{"name": "'):
        for data in (text.encode(), text.encode()[1:], text.encode()[:-1]):
            ids = tokens(data)
            assert b"".join(tokens.tokens[i] for i in ids) == data
            assert not set(ids) & set(tokens.special_token_ids)
            assert len(ids) <= max(1, len(data))
    assert tokens(b"hello world") == tokenizer.encode("hello world", add_special_tokens=False)


def test_a_random_walk_through_the_masks_is_valid_json(grammars: Grammars, tokenizer: Tokenizer):
    """Whatever is chosen, the text fits the schema once the end token is allowed, and not before."""
    for seed in range(30):
        output = walk(grammars, json_grammar(SCHEMA), tokenizer, seed)
        jsonschema.validate(json.loads(tokenizer.decode(output)), SCHEMA)


def test_masks_are_the_same_after_a_replay(grammars: Grammars, vocabulary: Vocabulary, tokenizer: Tokenizer):
    """Step by step here, from the output alone there (a handoff, a preemption): equal at every place."""
    grammar = json_grammar(SCHEMA)
    output = walk(grammars, grammar, tokenizer, 99)
    for length in range(len(output)):
        other = Grammars(lambda: vocabulary, InlineOffload(), max_seqs=8)
        here = masks(grammars, ("stepped", spec(grammar, output[:length])))
        there = masks(other, ("fresh", spec(grammar, output[:length])))
        np.testing.assert_array_equal(here, there)


def test_a_seq_that_goes_back_is_replayed(grammars: Grammars, tokenizer: Tokenizer):
    """A failed step's tokens are sampled again: the place kept is ahead of the seq, and not used."""
    grammar = json_grammar(SCHEMA)
    output = walk(grammars, grammar, tokenizer, 5)
    first = masks(grammars, ("s", spec(grammar, output[:1])))
    masks(grammars, ("s", spec(grammar, output[:4])))
    np.testing.assert_array_equal(masks(grammars, ("s", spec(grammar, output[:1]))), first)


def test_more_seqs_than_places_are_still_right(vocabulary: Vocabulary, tokenizer: Tokenizer):
    """A place that was forgotten is rebuilt."""
    few = Grammars(lambda: vocabulary, InlineOffload(), max_seqs=1)
    grammar = to_grammar("regex", "[ab]{3}")
    a, b = tokenizer.encode("a", add_special_tokens=False)[0], tokenizer.encode("b", add_special_tokens=False)[0]
    for length in range(3):
        rows = masks(few, ("x", spec(grammar, [a] * length)), ("y", spec(grammar, [b] * length)))
        np.testing.assert_array_equal(rows[0], rows[1])
    ended = masks(few, ("x", spec(grammar, [a] * 3)))
    assert allowed_ids(ended[0]) == list(tokenizer.end_token_ids)


def test_rows_without_a_grammar_are_open_and_cost_nothing(grammars: Grammars):
    """No mask at all where nobody has a grammar; all bits set beside one that has."""
    plain = spec("", [])
    assert grammars.masks([(SeqId("a"), plain)]) == (None, {})
    rows = masks(grammars, ("a", plain), ("b", spec(to_grammar("choice", '["yes", "no"]'), [])))
    assert (rows[0] == 0xFFFFFFFF).all()
    assert 0 < len(allowed_ids(rows[1])) < 10


def test_one_broken_seq_leaves_the_others_alone(grammars: Grammars):
    """Output that its grammar does not allow, or a grammar that cannot be compiled: that row alone fails."""
    good, bad = to_grammar("regex", "a+"), 'start: "x" nothing'
    allowed, broken = grammars.masks(
        [(SeqId("a"), spec(good, [])), (SeqId("b"), spec(good, [1000])), (SeqId("c"), spec(bad, []))]
    )
    assert allowed is not None
    assert set(broken) == {1, 2}
    assert len(allowed_ids(allowed[0])) < 100
    assert (allowed[1:] == 0xFFFFFFFF).all()


async def test_a_grammar_is_compiled_once_before_it_is_needed(vocabulary: Vocabulary):
    """`prepare` compiles off the step's thread, and refuses what cannot be."""
    loads: list[int] = []
    grammars = Grammars(lambda: loads.append(1) or vocabulary, InlineOffload(), max_seqs=2)
    for _ in range(3):
        await grammars.prepare(json_grammar(SCHEMA))
    assert loads == [1]
    with pytest.raises(GrammarError, match="nothing"):
        await grammars.prepare('start: "x" nothing')


def test_whitespace_between_parts_is_bounded(grammars: Grammars, tokenizer: Tokenizer):
    """A model cannot fill its answer with blanks: after one space there must be something else."""
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}})
    start = tokenizer.encode("[ ", add_special_tokens=False)
    texts = [tokenizer.decode([t]) for t in allowed_ids(masks(grammars, ("s", spec(grammar, start)))[0])]
    assert not [text for text in texts if text and not text.strip()]


def test_a_padded_vocabulary_allows_no_padding(tokenizer: Tokenizer):
    """Models often have more logits than the tokenizer has tokens."""
    padded = Vocabulary(tokenizer, tokenizer.vocab_size + 77)
    rows = Grammars(lambda: padded, InlineOffload(), 1).masks([(SeqId("a"), spec(to_grammar("regex", ".*"), []))])[0]
    assert rows is not None
    assert rows.shape[1] == -(-(tokenizer.vocab_size + 77) // 32)
    ids = allowed_ids(rows[0])
    assert len(ids) > 30000
    assert max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize(("kind", "text"), [("json_schema", "{"), ("grammar", "root ::= ("), ("choice", "5")])
def test_what_is_malformed_is_refused_with_a_reason(kind: Any, text: str):
    """Before anything is compiled."""
    with pytest.raises(GrammarError) as refusal:
        to_grammar(kind, text)
    assert str(refusal.value)
