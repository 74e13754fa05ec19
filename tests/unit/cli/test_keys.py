"""`baton keys`, on a real Redis."""

import pytest
from typer.testing import CliRunner

from services.cli.errors import CommandError
from services.cli.keys import app
from shared.api_keys import split


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_key_is_made_listed_and_revoked(redis_url: str):
    """Shown once, whole; listed by its id alone; valid, then revoked."""
    where = ("--redis-url", redis_url)
    assert "There are no keys" in run("ls", *where)
    key = run("add", "acme", "--name", "ci", "--rpm", "60", "--tpm", "1000", "--concurrent", "4", *where).strip()
    key_id, secret = split(key) or ("", "")
    listed = run("ls", *where)
    assert key_id
    assert all(word in listed for word in (key_id, "acme", "ci", "60", "1000", "4", "valid"))
    assert secret not in listed
    assert run("revoke", key_id, *where) == f"Revoked {key_id}.\n"
    assert "revoked" in run("ls", *where)


def test_what_cannot_be_is_one_line(redis_url: str):
    """A tenant with a space, an id that is not there."""
    for arguments in (("add", "a tenant"), ("revoke", "nobody")):
        with pytest.raises(CommandError):
            run(*arguments, "--redis-url", redis_url)
