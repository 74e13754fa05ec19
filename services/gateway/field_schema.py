"""What an endpoint reads from a request, as JSON Schema: the readers themselves say it.

A reader asks a `Fields` for each field with its type and bounds. Given a `SchemaFields` in its place, it finds every
field absent, and what it asked for is written down. So the description cannot differ from what is checked.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.fields import Fields


class SchemaFields(Fields):
    """A request without any field, which remembers what was asked of it."""

    def __init__(self, where: str = "") -> None:
        super().__init__({}, where)
        self._properties: dict[str, dict[str, Any] | SchemaFields] = {}
        self._required: list[str] = []

    def get(self, name: str, schema: Mapping[str, Any] | None = None, *, required: bool = False) -> Any:
        if schema is not None or name not in self._properties:
            self._properties[name] = dict(schema or {}) if required or schema is None else or_null(schema)
        if required and name not in self._required:
            self._required.append(name)
        return None

    def integer(self, name: str, low: int, high: int) -> int | None:
        self._properties[name] = {"type": ["integer", "null"], "minimum": low, "maximum": high}
        return None

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        lowest = "exclusiveMinimum" if above_low else "minimum"
        self._properties[name] = {"type": ["number", "null"], lowest: low, "maximum": high}
        return None

    def boolean(self, name: str) -> bool:
        self._properties[name] = {"type": ["boolean", "null"]}
        return False

    def text(self, name: str) -> str | None:
        self._properties[name] = {"type": ["string", "null"]}
        return None

    def object(self, name: str) -> Fields | None:
        nested = SchemaFields(self.path(name) + ".")
        self._properties[name] = nested
        return nested

    def schema(self, refused: Mapping[str, Sequence[Any]] | None = None) -> dict[str, Any]:
        """Of the whole request. Fields that are not named are ignored, so they are allowed.

        :param refused: fields which are not supported, with the values that change nothing.
        """
        properties: dict[str, Any] = {}
        for name, harmless in (refused or {}).items():
            properties[name] = {"enum": [None, *harmless], "description": "Not supported: refused if it matters."}
        for name, found in self._properties.items():
            properties[name] = or_null(found.schema()) if isinstance(found, SchemaFields) else found
        return {"type": "object", "properties": properties, "required": self._required}


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, or null, which counts as absent."""
    return {"anyOf": [dict(schema), {"type": "null"}]}
