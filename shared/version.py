"""The version of this tree; `pyproject.toml` has the same."""

VERSION = "0.1.0"
