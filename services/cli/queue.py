"""`baton queue`: what waits in the queue of submissions, what failed for good and why, and another try."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.cli.cell import Port, Url, with_cell
from services.cli.errors import CommandError

if TYPE_CHECKING:
    from shared.dead_letters import DeadLetter, DeadLetters

app = typer.Typer(
    name="queue", help="The queue of submissions through Redis, and its dead letters.", no_args_is_help=True
)
MAX_SHOWN_CHARS = 2000


@app.command("ls")
def list_letters(
    port: Port = None,
    redis_url: Url = "",
    limit: Annotated[int, typer.Option(help="Newest dead letters shown.")] = 20,
) -> None:
    """Count what waits and what is in work; list the dead letters, newest first."""

    async def look(letters: "DeadLetters") -> None:
        state, found = await letters.state(), await letters.latest(limit)
        print(f"{state.waiting} waiting, {state.open} in work, {state.dead} dead")
        if found:
            table = Table("id", "died", "reason")
            for letter in found:
                table.add_row(letter.id, _when(letter.died_ms), letter.reason)
            Console().print(table)

    _with_letters(look, port, redis_url)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="ID")], port: Port = None, redis_url: Url = "") -> None:
    """Show a dead letter: its reason, its submission and what its client was told."""

    async def look(letters: "DeadLetters") -> None:
        letter = await _find(letters, name)
        lines = [("id", letter.id), ("died", _when(letter.died_ms)), ("reason", letter.reason), ("entry", letter.entry)]
        lines += [
            (key.decode(), _cut(value.decode("utf-8", "replace"))) for key, value in letter.fields if key != b"id"
        ]
        told = await letters.last_of_result(letter.id)
        lines += [("told", _cut(f"{told['status']} {told.get('error', '')}"))] if "status" in told else []
        for key, value in lines:
            print(f"{key + ':':13}{value}")

    _with_letters(look, port, redis_url)


@app.command()
def retry(name: Annotated[str, typer.Argument(metavar="ID")], port: Port = None, redis_url: Url = "") -> None:
    """Submit a dead letter again, under its id; its old result is forgotten."""

    async def again(letters: "DeadLetters") -> None:
        letter = await _find(letters, name)
        answer = await letters.retry(letter)
        if answer == "gone":
            raise CommandError(f"{letter.id} was retried by somebody else just now")
        if answer == "open":
            raise CommandError(f"a submission with the id {letter.id} is in work; wait for its end")
        print(f"{letter.id} was submitted again as {answer}")

    _with_letters(again, port, redis_url)


async def _find(letters: "DeadLetters", name: str) -> "DeadLetter":
    found = await letters.find(name)
    if found is None:
        raise CommandError(f"there is no dead letter {name!r}; './baton queue ls' lists them")
    return found


def _with_letters(act: "Callable[[DeadLetters], Awaitable[None]]", port: int | None, redis_url: str) -> None:
    """Run `act` with the dead letters of the cell that is meant."""
    from shared.dead_letters import DeadLetters  # here, as in `with_cell`

    with_cell(lambda link, keys: act(DeadLetters(link, keys)), port, redis_url)


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000).strftime("%Y-%m-%d %H:%M:%S")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"
