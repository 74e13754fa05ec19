"""Reads one tool call, `{"name": "f", "arguments": {...}}`, as its text arrives."""

import json
from collections.abc import Collection
from dataclasses import dataclass

MAX_HEAD_CHARS = 4096
"""A call whose name and the beginning of whose arguments are not there by then is no call."""
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Began:
    """A call is certain: its name is known, its arguments begin."""

    name: str


@dataclass(frozen=True, slots=True)
class Part:
    """More of the arguments, as the model wrote them."""

    text: str


class NotACall(Exception):
    """What was read is something else, or a call that breaks off (`began` tells)."""


class CallScanner:
    """A JSON object, a character at a time. The arguments are handed on as they come once the name is known; where they
    come first, after it."""

    def __init__(self, names: Collection[str] | None) -> None:
        """:param names: only these are calls; None: any name is."""
        self._names = names
        self.raw: list[str] = []  # all that was read
        self._depth = 0
        self._in_string = self._escaped = False
        self._token = ""  # the string or scalar being read, at depth 1
        self._key: str | None = None
        self._name: str | None = None
        self._waiting: list[str] | None = None  # arguments read before the name
        self._in_arguments = False
        self.began = self.done = self.failed = False

    def push(self, char: str) -> list[Began | Part]:
        """:raises NotACall: it is none."""
        assert not self.done
        try:
            return self._push(char)
        except NotACall:
            self.failed = True
            raise

    def _push(self, char: str) -> list[Began | Part]:
        self.raw.append(char)
        if not self.began and len(self.raw) > MAX_HEAD_CHARS + (len(self._waiting or ())):
            raise NotACall
        if self._in_arguments:
            return self._argument(char)
        if self._in_string:
            self._string(char)
            return []
        if char == "{" and self._depth == 0:
            self._depth = 1
        elif self._depth == 0:
            raise NotACall
        elif char == '"':
            self._in_string, self._token = True, '"'
        elif char == ":":
            self._key, self._token = self._text(), ""
        elif char == "{" and self._key in _ARGUMENT_KEYS:
            self._in_arguments, self._depth, self._waiting = True, 2, []
            return self._emit(char)
        elif char in "{[":
            raise NotACall  # nothing else of a call is nested
        elif char in ",}":
            return self._value(char)
        elif not char.isspace():
            self._token += char
        return []

    def _value(self, char: str) -> list[Began | Part]:
        """The end of a value of the object itself."""
        out: list[Began | Part] = []
        if self._key == "name" and self._token:
            self._name = self._text()
            if self._names is not None and self._name not in self._names:
                raise NotACall
            out = self._begin()
        elif self._key in _ARGUMENT_KEYS and self._token.startswith('"'):
            self._waiting = list(self._text())  # an object in a string, as some models write
            out = self._begin()
        self._key, self._token = None, ""
        if char == "}":
            if self._name is None:
                raise NotACall
            if not self.began:
                self._waiting = list("{}")
                out += self._begin()
            self.done = True
        return out

    def _begin(self) -> list[Began | Part]:
        if self.began or self._name is None or self._waiting is None:
            return []
        self.began = True
        return [Began(self._name), *([Part("".join(self._waiting))] if self._waiting else [])]

    def _argument(self, char: str) -> list[Began | Part]:
        if self._in_string:
            self._string(char)
        elif char == '"':
            self._in_string, self._token = True, '"'
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._in_arguments, self._token, self._key = False, "", None
        return self._emit(char)

    def _emit(self, char: str) -> list[Began | Part]:
        if self.began:
            return [Part(char)]
        assert self._waiting is not None
        self._waiting.append(char)
        return self._begin()

    def _string(self, char: str) -> None:
        if not self._in_arguments:
            self._token += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _text(self) -> str:
        try:
            value = json.loads(self._token)
        except ValueError:
            raise NotACall from None
        if not isinstance(value, str):
            raise NotACall
        return value
