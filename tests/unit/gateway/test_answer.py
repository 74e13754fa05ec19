"""Reasoning and tool calls in an answer's text: the same however the text was cut."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from services.gateway.answer import (
    AnswerParser,
    AnswerShape,
    CallBegan,
    CallPart,
    Content,
    Piece,
    Reasoning,
    _joined,
)
from services.gateway.tool_formats import FORMATS

TWO = '{"a": "}\\"{", "b": [1, {"c": null}]}'
CASES: list[tuple[str, str, list[Piece]]] = [
    (
        "hermes",
        f'Sure! \n<tool_call>\n{{"name": "f", "arguments": {TWO}}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>',
        [Content("Sure!"), CallBegan(0, "f"), CallPart(0, TWO), CallBegan(1, "g"), CallPart(1, "{}")],
    ),
    ("hermes", "<tool_call>\nno\n</tool_call> x < y <tool", [Content("<tool_call>\nno\n</tool_call> x < y <tool")]),
    ("hermes", "plain { a } \n", [Content("plain { a } \n")]),
    (
        "hermes",
        '<tool_call>{"arguments": {"q": 1}, "name": "f"}</tool_call> tail ',
        [CallBegan(0, "f"), CallPart(0, '{"q": 1}'), Content("tail ")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [CallBegan(0, "f"), CallPart(0, '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [CallBegan(0, "f"), CallPart(0, '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [CallBegan(0, "f"), CallPart(0, "{}")]),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', [Content('<tool_call>{"name": 5}</tool_call>')]),
    ("hermes", '<tool_call>{"na', [Content('<tool_call>{"na')]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [CallBegan(0, "f"), CallPart(0, '{"a": 1}'), CallBegan(1, "g"), CallPart(1, "{}")],
    ),
    ("mistral", "hello [TOOL", [Content("hello [TOOL")]),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', [CallBegan(0, "f"), CallPart(0, '{"x": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        [CallBegan(0, "f"), CallPart(0, '{"x": 1}'), CallBegan(1, "g"), CallPart(1, "{}")],
    ),
    ("llama3_json", '{"name": "zz", "parameters": {}}', [Content('{"name": "zz", "parameters": {}}')]),
    ("llama3_json", '{"a": [1, 2]} and so', [Content('{"a": [1, 2]} and so')]),
    ("llama3_json", 'Text {"name": "f", "parameters": {}}', [Content('Text {"name": "f", "parameters": {}}')]),
]
THOUGHTS: list[tuple[str, list[Piece]]] = [
    ("<think>\nhmm </ b\n</think>\n\nAnswer", [Reasoning("\nhmm </ b\n"), Content("Answer")]),
    ("no think", [Content("no think")]),
    ("<thin", [Content("<thin")]),
    ("<think>open", [Reasoning("open")]),
    ("\n<think>a</think>", [Reasoning("a")]),
    (
        '<think>x</think><tool_call>{"name":"f","arguments":{}}</tool_call>',
        [Reasoning("x"), CallBegan(0, "f"), CallPart(0, "{}")],
    ),
]


def parts(text: str, shape: AnswerShape, cuts: list[int]) -> list[Piece]:
    parser = AnswerParser(shape)
    out: list[Piece] = []
    for begin, end in pairwise([0, *cuts, len(text)]):
        out += parser.push(text[begin:end])
    return _joined(out + parser.finish())


def check(text: str, shape: AnswerShape, want: list[Piece]) -> None:
    rng = random.Random(len(text))
    assert parts(text, shape, []) == want
    assert parts(text, shape, list(range(1, len(text)))) == want
    for _ in range(60):
        assert (
            parts(text, shape, sorted(rng.sample(range(1, len(text)), rng.randint(1, min(12, len(text) - 1))))) == want
        )


@pytest.mark.parametrize(("form", "text", "want"), CASES)
def test_tool_calls_are_found_wherever_the_text_is_cut(form: str, text: str, want: list[Piece]):
    """Calls of each format; and text that only looks like one stays text, every character of it."""
    check(text, AnswerShape(tools=FORMATS[form], names=("f", "g")), want)


@pytest.mark.parametrize(("text", "want"), THOUGHTS)
def test_reasoning_is_split_off_wherever_the_text_is_cut(text: str, want: list[Piece]):
    """`<think>` at the beginning, closed or not."""
    check(text, AnswerShape(reasoning=True, tools=FORMATS["hermes"], names=("f",)), want)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", ' [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'),
        ("hermes", '{"name": "f", "arguments": {"a": 1}}\n\n{"name": "g", "arguments": {}}\n'),
    ],
)
def test_calls_are_found_without_markers_that_are_special_tokens(form: str, text: str):
    """Special tokens are not shown: the answer begins with a call of a tool that is there."""
    bare = AnswerShape(tools=replace(FORMATS[form], bare=True), names=("f", "g"))
    check(text, bare, [CallBegan(0, "f"), CallPart(0, '{"a": 1}'), CallBegan(1, "g"), CallPart(1, "{}")])
    for other in (text.replace('"f"', '"h"'), "[1, 2]", "[", "x" + text):
        check(other, bare, [Content(other)]) if len(other) > 1 else None


@pytest.mark.parametrize(
    ("form", "call", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "\n</tool_call>\n<tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "]"),
    ],
)
def test_an_answer_cut_in_a_marker_behind_a_call_shows_none_of_it(form: str, call: str, rest: str):
    """`max_tokens` may end it anywhere in there; other text is content still."""
    shape = AnswerShape(tools=FORMATS[form], names=("f",))
    for size in range(len(rest) + 1):
        check(call + rest[:size], shape, [CallBegan(0, "f"), CallPart(0, "{}")])
    assert "".join(p.text for p in parts(call + "\n</tool_box", shape, []) if isinstance(p, Content)).strip()


@pytest.mark.parametrize("form", FORMATS)
def test_without_parallel_calls_only_the_first_is_shown(form: str):
    """Of each format, however the text was cut."""
    written = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"b": 2}}</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]',
        "llama3_json": '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"b": 2}}',
    }
    first: list[Piece] = [CallBegan(0, "f"), CallPart(0, '{"a": 1}')]
    check(written[form], AnswerShape(tools=FORMATS[form], names=("f", "g"), parallel=False), first)
    both: list[Piece] = [*first, CallBegan(1, "g"), CallPart(1, '{"b": 2}')]
    check(written[form], AnswerShape(tools=FORMATS[form], names=("f", "g")), both)


def test_a_prompt_may_have_begun_the_reasoning():
    """Templates that end in `<think>`: the answer begins inside."""
    check("a b</think>c", AnswerShape(reasoning=True, begins_thinking=True), [Reasoning("a b"), Content("c")])


@pytest.mark.parametrize("form", FORMATS)
def test_random_text_is_never_lost(form: str):
    """Without a whole call, content is the text; whatever happens, nothing raises."""
    rng = random.Random(7)
    words = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "{", "}", '"name"', ": ", '"f"', ",", " "]
    words += ["[", "]", "\n", '"arguments"', "a", "\\", '"']
    for _ in range(1500):
        text = "".join(rng.choices(words, k=rng.randint(1, 14)))
        got = parts(text, AnswerShape(tools=FORMATS[form], names=("f",)), [])
        if not any(isinstance(piece, CallBegan) for piece in got):
            assert got == [Content(text)], text


def test_arguments_of_random_calls_come_back():
    """Any JSON object, through a call, is what was called with."""
    rng = random.Random(3)

    def value(depth: int) -> object:
        kind = rng.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        if kind == 5:
            return {rng.choice(['a"', "b\\", "{", "é"]): value(depth - 1) for _ in range(rng.randrange(3))}
        return [rng.randrange(99), "x}\"'\\n{", None, -1.5e3][kind]

    for _ in range(200):
        want = {"v": value(3)}
        text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': want})}</tool_call>"
        got = parts(text, AnswerShape(tools=FORMATS["hermes"]), sorted(rng.sample(range(1, len(text)), 3)))
        assert isinstance(got[1], CallPart)
        assert json.loads(got[1].text) == want
        assert len(got) == 2
