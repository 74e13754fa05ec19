"""`baton keys`: API keys of a cell. A key is shown once, when it is made; Redis has only a digest of it."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from services.cli.cell import Port, Url, with_cell
from services.cli.errors import CommandError
from shared.clock import SystemClock

if TYPE_CHECKING:
    from shared.api_keys import ApiKeys

app = typer.Typer(
    name="keys", help="API keys. Once there is one, every request to the API needs one.", no_args_is_help=True
)


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="On whose account: A-Z a-z 0-9 . _ -, at most 64.")],
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    requests_per_minute: Annotated[int, typer.Option("--rpm", min=0, help="Requests per minute; 0 = any.")] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option("--tpm", min=0, help="Tokens per minute, prompts and answers; 0 = any.")
    ] = 0,
    max_concurrent: Annotated[int, typer.Option("--concurrent", min=0, help="Requests at once; 0 = any.")] = 0,
    port: Port = None,
    redis_url: Url = "",
) -> None:
    """Make a key and print it: this once. Its limits are shared by all gateways of the cell."""
    from shared.api_keys import TENANT, ApiKey
    from shared.randomness import SystemRandomness

    if not TENANT.fullmatch(tenant):
        raise CommandError("a tenant has 1 to 64 characters of A-Z a-z 0-9 . _ -, a letter or digit first")
    draft = ApiKey(
        id="",
        digest="",
        tenant=tenant,
        name=name,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
    )

    async def make(keys: "ApiKeys") -> None:
        first = not await keys.any()
        text, record = await keys.add(draft, SystemClock(), SystemRandomness())
        Console(stderr=True).print(f"Key {record.id} of {tenant}; it is not shown again." + (_FIRST if first else ""))
        print(text)

    _with_keys(make, port, redis_url)


_FIRST = " It is the first one: from now on every request to the API needs a key."


@app.command("ls")
def list_keys(port: Port = None, redis_url: Url = "") -> None:
    """List the keys, oldest first: what they may do, not what they are."""

    async def look(keys: "ApiKeys") -> None:
        found = await keys.all()
        if not found:
            print("There are no keys: anyone who reaches the port may ask.")
            return
        table = Table(Column("id", no_wrap=True), Column("tenant", overflow="fold"), "name", "made")
        for column in ("req/min", "tok/min", "at once", "state"):
            table.add_column(column, no_wrap=column == "state")
        for k in found:
            limits = (k.requests_per_minute, k.tokens_per_minute, k.max_concurrent)
            made = datetime.fromtimestamp(k.created_at).strftime("%Y-%m-%d")
            state = "revoked" if k.revoked else "valid"
            table.add_row(k.id, k.tenant, k.name, made, *(str(limit or "-") for limit in limits), state)
        Console().print(table)

    _with_keys(look, port, redis_url)


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID")], port: Port = None, redis_url: Url = "") -> None:
    """Refuse a key from now on; gateways notice within two seconds. Requests under way go on."""

    async def end(keys: "ApiKeys") -> None:
        if not await keys.revoke(key_id):
            raise CommandError(f"there is no key {key_id!r}; './baton keys ls' lists them")
        print(f"Revoked {key_id}.")

    _with_keys(end, port, redis_url)


def _with_keys(act: "Callable[[ApiKeys], Awaitable[None]]", port: int | None, redis_url: str) -> None:
    """Run `act` with the keys of the cell that is meant."""
    from shared.api_keys import ApiKeys  # here, as in `with_cell`

    with_cell(lambda link, keys: act(ApiKeys(link, keys)), port, redis_url)
