"""Checked access to a request's fields. Every refusal is a 400 that names the field."""

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import bad_field


class Fields:
    """A JSON object of a client. A field that is null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw = raw
        self._where = where

    def path(self, name: str) -> str:
        return self._where + name

    def get(self, name: str, schema: Mapping[str, Any] | None = None, *, required: bool = False) -> Any:
        """The value as it came.

        :param schema: what the caller will accept, as JSON Schema: for the API's description (`SchemaFields`).
        :param required: the caller refuses a request without it.
        """
        return self.raw.get(name)

    def integer(self, name: str, low: int, high: int, *, off: Any = None) -> int | None:
        """None if absent. :param off: a value that means the same as null."""
        value = self.get(name)
        if value is None or (off is not None and value is off):
            return None
        if type(value) is not int:  # a bool is no integer here
            raise bad_field(self.path(name), f"{self.path(name)} must be an integer.")
        return _in_range(self.path(name), value, low, high)

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """:param above_low: `low` itself is refused."""
        value = self.get(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise bad_field(self.path(name), f"{self.path(name)} must be a number.")
        if above_low and value == low:
            raise bad_field(self.path(name), f"{self.path(name)} must be above {low}.")
        return float(_in_range(self.path(name), value, low, high))

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise bad_field(self.path(name), f"{self.path(name)} must be true or false.")
        return value

    def text(self, name: str) -> str | None:
        value = self.get(name)
        return None if value is None else checked_text(self.path(name), value)

    def object(self, name: str) -> "Fields | None":
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad_field(self.path(name), f"{self.path(name)} must be an object.")
        return Fields(value, self.path(name) + ".")


def checked_text(path: str, value: Any) -> str:
    """`value`, if it is text that UTF-8 can carry (JSON can escape halves of surrogate pairs)."""
    if not isinstance(value, str):
        raise bad_field(path, f"{path} must be a string.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_field(path, f"{path} is not valid Unicode text.") from None
    return value


def _in_range(path: str, value: Any, low: float, high: float) -> Any:
    if not low <= value <= high:
        raise bad_field(path, f"{path} must be between {low} and {high}, got {value!s:.40}.")
    return value
