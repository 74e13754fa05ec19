"""JSON of clients, whose depth is bounded: what is decoded is encoded again (schemas, arguments of tools), by encoders
that fail on deep nesting."""

from typing import Any

import msgspec

MAX_DEPTH = 256


def decode_json(text: bytes | str) -> Any:
    """:raises msgspec.DecodeError: not JSON, or nested deeper than MAX_DEPTH.
    :raises UnicodeDecodeError: not UTF-8.
    """
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep() from None
    if _num_openings(text) > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _num_openings(text: bytes | str) -> int:
    """At least the depth; far cheaper than to walk through a value."""
    if isinstance(text, str):
        return text.count("{") + text.count("[")
    return text.count(b"{") + text.count(b"[")


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` arrays and objects lie within one another. Level by level: no recursion."""
    level = [value]
    for _ in range(limit + 1):
        level = [x for x in level if isinstance(x, dict | list)]
        if not level:
            return False
        level = [inner for x in level for inner in (x.values() if isinstance(x, dict) else x)]
    return True


def _too_deep() -> msgspec.DecodeError:
    return msgspec.DecodeError(f"it is nested too deeply: at most {MAX_DEPTH} arrays and objects within one another")
