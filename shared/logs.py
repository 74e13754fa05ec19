"""Structured logs. Ids are bound once; prompt text and secrets are never logged."""

import logging
import re
import sys
from typing import Any, Literal

import structlog

_SECRETS = re.compile(
    r"(?P<key>baton-[0-9a-f]{12}-)[0-9a-f]{16,}"  # API keys: the id may be told
    r"|(?P<bearer>bearer\s+)[^\s\"',}]+"
    r"|(?P<url>\b(?:rediss?|unix|https?)://[^\s/@:\"']*:)[^\s/@\"']+(?=@)",  # passwords in URLs
    re.IGNORECASE,
)

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def redacted(text: str) -> str:
    """`text` without API keys, bearer tokens and passwords of URLs."""
    return _SECRETS.sub(lambda m: f"{m['key'] or m['bearer'] or m['url']}***", text)


class _Redacting:
    """The last processor: whatever a library or an exception says goes through it."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __call__(self, logger: Any, name: str, event: Any) -> str:
        return redacted(self._renderer(logger, name, event))


def configure(service: str, fmt: Literal["console", "json"], level: str) -> None:
    """Set up the process's logging, libraries' included, on stderr."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last = _Redacting(
        structlog.processors.JSONRenderer() if fmt == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    exceptions = [structlog.processors.format_exc_info] if fmt == "json" else []
    structlog.configure(
        processors=[*shared, *exceptions, last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    plain = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    formatter = structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[plain, *exceptions, last])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(_LEVELS[level], logging.WARNING))
    structlog.contextvars.bind_contextvars(service=service)
