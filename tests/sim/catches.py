"""The seed that showed each planted bug when `python -m tests.sim --remember` last looked: where to look first."""

CATCHES: dict[str, int] = {}
