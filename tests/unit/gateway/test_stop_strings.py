"""Stop strings, against the definition: the first character at which any of them is complete."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stop_strings import StopMatcher


def by_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text to show, by trying every prefix."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """What is shown after each piece, to the hit or the end."""
    matcher, shown = StopMatcher(stops), []
    for piece in pieces:
        text, hit = matcher.push(piece)
        shown.append(text)
        if hit:
            return shown, True
    return [*shown, matcher.flush()], False


letters = st.text("aab", max_size=6)


@given(st.lists(letters, max_size=10), st.lists(st.text("aab", min_size=1, max_size=5), max_size=4))
def test_any_cut_of_the_text_gives_the_same_answer(pieces: list[str], stops: list[str]):
    """The result is the definition's, however the text arrives."""
    shown, hit = run(pieces, stops)
    assert ("".join(shown), hit) == by_definition("".join(pieces), stops)


@given(st.lists(letters, max_size=10), st.lists(st.text("aab", min_size=1, max_size=5), max_size=4))
def test_only_a_possible_start_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]):
    """What is held back is a prefix of a stop string, and the longest such."""
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        new, hit = matcher.push(piece)
        text, shown = text + piece, shown + new
        if hit:
            return
        starts = [k for k in range(len(text)) for stop in stops if stop.startswith(text[k:])]
        assert shown == text[: min(starts, default=len(text))]


def test_a_stop_string_across_pieces_is_never_shown():
    """The start of it waits for the rest."""
    assert run(["Hello ", "EN", "D", "x"], ["END"]) == (["Hello ", "", ""], True)
    assert run(["Hello ", "EN", "O", "x"], ["END"]) == (["Hello ", "", "ENO", "x", ""], False)
    assert run(["Hello ", "EN"], ["END"]) == (["Hello ", "", "EN"], False)
