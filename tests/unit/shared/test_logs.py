"""Secrets stay out of logs, however they get near one."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from shared.logs import redacted

ROOT = Path(__file__).resolve().parents[3]
KEY = f"baton-0123456789ab-{'f' * 64}"


@pytest.mark.parametrize(
    ("text", "kept", "gone"),
    [
        (f"key {KEY} refused", "key baton-0123456789ab-*** refused", "ffff"),
        ('{"authorization": "Bearer abc.def"}', '{"authorization": "Bearer ***"}', "abc"),
        ("redis at redis://:hunter2@host:6379/0 is away", "redis at redis://:***@host:6379/0 is away", "hunter2"),
        ("rediss://user:hunter2@host/0", "rediss://user:***@host/0", "hunter2"),
        ("http://host:8000/ready", "http://host:8000/ready", "***"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0", "***"),
    ],
)
def test_secrets_are_masked_and_the_rest_stays(text: str, kept: str, gone: str):
    """What names a key may stay, what opens a door may not."""
    assert redacted(text) == kept
    assert gone not in redacted(text)


PROGRAM = f"""
import logging, structlog
from shared.logs import configure
configure("gateway", "{{fmt}}", "info")
log = structlog.get_logger("x")
log.info("seen", header="Bearer {KEY}", nested={{{{"url": "redis://:hunter2@h/0"}}}})
try:
    raise RuntimeError("redis://:hunter2@h/0 with {KEY}")
except RuntimeError:
    log.exception("crashed")
    logging.getLogger("library").exception("a library's own: %s", "{KEY}")
"""


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_no_secret_reaches_the_stream(fmt: str):
    """Values, nested values, tracebacks, other libraries' loggers, in both formats."""
    program = PROGRAM.format(fmt=fmt)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    out = done.stderr + done.stdout
    assert out.count("baton-0123456789ab-***") >= 2
    assert "hunter2" not in out
    assert "f" * 20 not in out
    if fmt == "json":
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["event"] for line in lines][:2] == ["seen", "crashed"]
        assert not any(name.startswith("_") for line in lines for name in line), "a logger's own objects"
    assert logging.getLogger("library")
