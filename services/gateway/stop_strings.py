"""Stop strings in a text that arrives in pieces.

The text ends before the stop string that is complete first; of several that end at the same character, the
longest counts. So the result does not depend on how the text was cut into pieces. One Knuth-Morris-Pratt
automaton per string (Knuth, Morris, Pratt 1977): each character is looked at once.
"""

from collections.abc import Sequence


class StopMatcher:
    """One choice's matcher. Holds back text that may be the start of a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """:param include: the stop string itself may be shown."""
        assert all(stops)
        self._include = include
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(the text that may be shown now, whether a stop string was hit). After a hit: no more calls."""
        if not self._automata:
            return text, False
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            char = pending[end]
            hit = max(automaton.step(char) for automaton in self._automata)
            if hit:
                self._held = ""
                return pending[: end + 1 - (0 if self._include else hit)], True
        num_held = max(automaton.matched for automaton in self._automata)
        shown = len(pending) - num_held
        self._held = pending[shown:]
        return pending[:shown], False

    def flush(self) -> str:
        """At the end of the text: what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._fallback = _fallback_table(pattern)
        self.matched = 0  # length of the longest prefix of the pattern that the text ends with

    def step(self, char: str) -> int:
        """Length of the pattern if it is complete with this character, else 0."""
        matched = self.matched
        while matched and self._pattern[matched] != char:
            matched = self._fallback[matched - 1]
        if self._pattern[matched] == char:
            matched += 1
        self.matched = matched if matched < len(self._pattern) else 0
        return matched if matched == len(self._pattern) else 0


def _fallback_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
