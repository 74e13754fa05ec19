"""An answer's text taken apart as it comes: reasoning, content, tool calls.

The parts of a choice, joined, are the same however its text was cut, so that a stream and a whole answer say the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from services.gateway.call_scanner import Began, CallScanner, NotACall, Part
from services.gateway.tool_formats import ToolFormat

THINK, UNTHINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallPart:
    index: int
    text: str  # of the arguments


Piece = Content | Reasoning | CallBegan | CallPart


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What may be in an answer beside text. Frozen: one for all choices of a request."""

    reasoning: bool = False
    begins_thinking: bool = False  # the prompt ends inside the reasoning
    tools: ToolFormat | None = None
    names: Collection[str] = ()
    parallel: bool = True  # else only the first call is shown

    @property
    def is_plain(self) -> bool:
        return not self.reasoning and self.tools is None


class AnswerParser:
    """One choice's answer."""

    def __init__(self, shape: AnswerShape) -> None:
        self._reasoning = _ReasoningParser(begins_thinking=shape.begins_thinking) if shape.reasoning else None
        self._tools = None if shape.tools is None else _ToolParser(shape.tools, shape.names, shape.parallel)
        self.num_calls = 0
        self.num_reasoning_tokens = 0

    def push(self, text: str, num_tokens: int = 0) -> list[Piece]:
        """:param num_tokens: of the answer, up to the end of `text`: while it is all thought, these are thoughts."""
        pieces = self._push(text)
        if self._reasoning is not None and self._reasoning.is_thinking:
            self.num_reasoning_tokens = num_tokens
        return pieces

    def _push(self, text: str) -> list[Piece]:
        if self._reasoning is None:
            return self._content(text)
        out: list[Piece] = []
        for piece in self._reasoning.push(text):
            out += [piece] if isinstance(piece, Reasoning) else self._content(piece.text)
        return out

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        out: list[Piece] = []
        for piece in [] if self._reasoning is None else self._reasoning.finish():
            out += [piece] if isinstance(piece, Reasoning) else self._content(piece.text)
        return out + self._counted([] if self._tools is None else self._tools.finish())

    def _content(self, text: str) -> list[Piece]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._counted(self._tools.push(text))

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        self.num_calls += sum(isinstance(piece, CallBegan) for piece in pieces)
        return pieces


class _ReasoningParser:
    """`<think>` at the beginning, up to `</think>`; the rest is the answer."""

    def __init__(self, *, begins_thinking: bool) -> None:
        self._state = "thinking" if begins_thinking else "start"
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> list[Reasoning | Content]:
        self._held += text
        out: list[Reasoning | Content] = []
        if self._state == "start":
            start = self._held.lstrip()
            if start.startswith(THINK):
                self._state, self._held = "thinking", start.removeprefix(THINK)
            elif not THINK.startswith(start):
                self._state = "answer"
        if self._state == "thinking":
            shown, found, rest = self._held.partition(UNTHINK)
            kept = 0 if found else _overlap(shown, UNTHINK)
            shown, self._held = shown[: len(shown) - kept], rest if found else shown[len(shown) - kept :]
            if shown:
                out.append(Reasoning(shown))
            if found:
                self._state = "between"
        if self._state == "between" and (rest := self._held.lstrip("\n")):
            self._state, self._held = "answer", rest
        if self._state == "answer" and self._held:
            out.append(Content(self._held))
            self._held = ""
        return out

    def finish(self) -> list[Reasoning | Content]:
        held, self._held = self._held, ""
        if not held or self._state == "between":
            return []
        return [Reasoning(held) if self._state == "thinking" else Content(held)]


class _ToolParser:
    """Content, and calls in one format. Blanks beside calls are dropped."""

    def __init__(self, form: ToolFormat, names: Collection[str], parallel: bool) -> None:
        self._form = form
        self._parallel = parallel
        self._names = names
        self._text = ""  # not yet shown: it may be the beginning of a call, or blanks before one
        self._seen_text = False
        self._opening = ""  # what stood before the call being read
        self._scanner: CallScanner | None = None
        self._after_call = False
        self._in_list = False
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        for char in text:
            if self._scanner is not None:
                self._scan(self._scanner, char, out)
            else:
                self._text += char
                self._look(out)
        return self._kept(out)

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        if self._scanner is not None and not self._scanner.began:
            self._give_up(self._scanner, out)
        if self._text and not (self._after_call and (self._is_noise(self._text) or self._is_cut_marker(self._text))):
            out.append(Content(self._text))
        self._text = ""
        return self._kept(out)

    def _kept(self, out: list[Piece]) -> list[Piece]:
        """Without the calls that the client did not ask for."""
        if not self._parallel:
            out = [piece for piece in out if not isinstance(piece, CallBegan | CallPart) or piece.index == 0]
        return _joined(out)

    def _look(self, out: list[Piece]) -> None:
        """Outside a call: show what is text, begin a call where one begins."""
        text, form = self._text, self._form
        if text[-1] == "{" and self._may_begin(text[:-1]):
            self._opening, self._text = text[:-1], ""
            self._scanner = CallScanner(self._names if self._is_bare(self._opening) else None)
            self._scan(self._scanner, "{", out)
            return
        if self._after_call:
            text = text.lstrip()
            if form.end and text == form.end:
                self._text = ""
                return
        begin = form.begin
        if begin in text:
            if not self._is_opening(text[text.index(begin) :]):
                self._show(text, out)
            return
        if self._after_call and (form.end.startswith(text) or self._is_noise(text)):
            return
        if form.is_list and self._is_bare(text):
            return
        kept = _overlap(text, begin)
        shown = text[: len(text) - kept].rstrip()
        self._show(shown, out)
        self._text = text[len(shown) :]

    def _may_begin(self, before: str) -> bool:
        """Whether a call may begin behind `before`."""
        if self._in_list and self._is_noise(before):
            return True
        at = before.rfind(self._form.begin)
        return self._is_opening(before[at:]) if at >= 0 else self._is_bare(before)

    def _is_opening(self, text: str) -> bool:
        """`text` begins with the marker; nothing but blanks (and a list's bracket) may follow it."""
        rest = text.removeprefix(self._form.begin).strip()
        return not rest or (self._form.is_list and rest == "[")

    def _is_bare(self, before: str) -> bool:
        """Whether a call may begin behind `before` without the marker, at the beginning of the answer."""
        form = self._form
        return form.bare and not self._seen_text and before.strip() in ("", "[" if form.is_list else "")

    def _is_noise(self, text: str) -> bool:
        """Blanks, and what stands between and behind calls."""
        rest = text.strip()
        return not rest or (self._after_call and rest in (self._form.between.strip(), "]"))

    def _is_cut_marker(self, text: str) -> bool:
        """The beginning of a marker behind a call, where the answer was cut short."""
        return any(marker.startswith(text.strip()) for marker in (self._form.end, self._form.begin))

    def _show(self, text: str, out: list[Piece]) -> None:
        if text:
            self._seen_text, self._after_call, self._in_list = True, False, False
            out.append(Content(text))
        self._text = ""

    def _scan(self, scanner: CallScanner, char: str, out: list[Piece]) -> None:
        try:
            for event in scanner.push(char):
                if isinstance(event, Began):
                    out.append(CallBegan(self._num_calls, event.name))
                    self._num_calls += 1
                elif isinstance(event, Part):
                    out.append(CallPart(self._num_calls - 1, event.text))
        except NotACall:
            if not scanner.began:
                self._give_up(scanner, out)
                return
        if scanner.done or (scanner.began and scanner.failed):
            self._scanner, self._after_call, self._in_list = None, True, self._form.is_list or self._form.bare

    def _give_up(self, scanner: CallScanner, out: list[Piece]) -> None:
        """It was text after all."""
        self._scanner = None
        self._show(self._opening + "".join(scanner.raw), out)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    out: list[Piece] = []
    for _, group in groupby(pieces, lambda p: (type(p), p.index if isinstance(p, CallBegan | CallPart) else 0)):
        same = list(group)
        first = same[0]
        if isinstance(first, CallBegan):
            out += same
            continue
        text = "".join(piece.text for piece in same if not isinstance(piece, CallBegan))
        out.append(CallPart(first.index, text) if isinstance(first, CallPart) else type(first)(text))
    return out
