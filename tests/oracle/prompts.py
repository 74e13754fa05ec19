"""Varied prompts: prose, code, other scripts, emoji, one token, and some hundreds of tokens."""

PROSE = "The lighthouse keeper counted the ships each evening, and on the night of the storm he counted one too many."
CODE = (
    "def merge(left: list[int], right: list[int]) -> list[int]:\n"
    '    """Merge two sorted lists."""\n'
    "    out = []\n    while left and right:\n        out.append((left if left[0] <= right[0] else right).pop(0))\n"
    "    return out + left + "
)
OTHER_SCRIPTS = "Быстрая лиса прыгает. 日本語の文章です。 مرحبا بالعالم. Ελληνικά, עברית, हिन्दी में।"
EMOJI = "Weather today: 🌧️☔ then 🌈! Family: 👨‍👩‍👧‍👦, flags: 🇯🇵🇧🇷, thumbs: 👍🏽. Zero\u200dwidth and tabs\t\there."
SHORT = "Hello"
LONG_TOKENS = 600


def long_text() -> str:
    """Prose of more than 600 tokens that never repeats itself."""
    places = ("harbour", "mill", "orchard", "chapel", "quarry", "bridge", "market", "forge", "ferry", "school")
    things = ("a brass key", "two letters", "seven lamps", "an old map", "the last coin", "a blue door")
    lines = []
    for day in range(1, 61):
        place, thing = places[day * 7 % 10], things[day * 5 % 6]
        lines.append(f"On day {day} the clerk walked {day * 13 % 29} miles to the {place} and found {thing} there.")
    return " ".join(lines)


ALL = {"prose": PROSE, "code": CODE, "other scripts": OTHER_SCRIPTS, "emoji": EMOJI, "short": SHORT}
