"""Prints pyproject.toml's dependencies, one per line, but for those named: what an image installs."""

import argparse
import re
import tomllib
from pathlib import Path


def requirements(pyproject: str, without: set[str]) -> list[str]:
    """The project's dependencies without the packages named.

    :raises SystemExit: one of them is no dependency: it may have been renamed, and would be installed.
    """
    wanted: dict[str, str] = {}
    for line in tomllib.loads(pyproject)["project"]["dependencies"]:
        wanted[re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]] = line
    if unknown := without - set(wanted):
        raise SystemExit(f"not among the dependencies: {', '.join(sorted(unknown))}")
    return [line for name, line in wanted.items() if name not in without]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", default="", help="comma-separated names")
    chosen = parser.parse_args()
    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print("\n".join(requirements(file.read_text(), set(filter(None, chosen.without.split(","))))))
