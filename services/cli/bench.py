"""`baton bench`: measures this machine, in a process of its own, since the command line imports no engine."""

import os
import sys
from typing import Annotated

import typer

from services.cli.plan import child_environ

app = typer.Typer(name="bench", help="Measure what this machine can do.", no_args_is_help=True)


@app.command()
def kernels(
    threads: Annotated[int | None, typer.Option(help="Default: one per core.", min=1)] = None,
    repeats: Annotated[int, typer.Option(help="The best of so many counts.", min=1)] = 9,
) -> None:
    """Each CPU op: microseconds, GB/s, GOP/s, and the share of this machine's measured ceiling."""
    argv = [sys.executable, "-m", "services.engine.bench", "--repeats", str(repeats)]
    if threads is not None:
        argv += ["--threads", str(threads)]
    sys.stdout.flush()
    os.execve(sys.executable, argv, child_environ(os.environ))
