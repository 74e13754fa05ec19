"""`baton test` and `baton check`: what CI runs, run the same way."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli.errors import CommandError
from services.cli.plan import child_environ
from services.cli.rundir import home

PATHS = ("services", "shared", "kernels", "tests")


def pytest_argv(arguments: Sequence[str], *, full: bool) -> list[str]:
    """The quick tests, or all; `arguments` are pytest's own and come last, so that they win."""
    selection = [] if full else ["-m", "not full"]
    return [sys.executable, "-m", "pytest", *selection, *arguments]


def run_tests(arguments: Sequence[str], *, full: bool) -> int:
    """pytest's exit code. It takes this process's place, so that Ctrl-C is pytest's alone."""
    os.chdir(_checkout())
    os.execve(sys.executable, pytest_argv(arguments, full=full), child_environ(os.environ))


def run_checks(*, tests: bool, variants: Sequence[str] = ()) -> list[str]:
    """Run every check, even after one has failed; the names of those that failed.

    :param variants: of the kernels' build, on which their tests run too; see tests/kernels/variant.
    """
    steps = {
        "ruff check": ["ruff", "check", *PATHS],
        "ruff format": ["ruff", "format", "--check", *PATHS],
        "pyright": ["pyright"],
    }
    commands = {name: [sys.executable, "-m", *words] for name, words in steps.items()}
    if tests:
        commands["tests"] = pytest_argv((), full=False)
    commands |= {f"kernels, {name}": ["tests/kernels/variant", name] for name in variants}
    environ = child_environ(os.environ) | {"PYTHON": sys.executable}
    failed: list[str] = []
    for name, argv in commands.items():
        print(f"== {name}", flush=True)
        if subprocess.run(argv, cwd=_checkout(), env=environ).returncode:
            failed.append(name)
    return failed


def _checkout() -> Path:
    root = home()
    if not (root / "tests").is_dir():
        raise CommandError("there are no tests here: run this from a clone, with ./baton")
    return root
