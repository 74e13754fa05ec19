"""What an endpoint reads from a request, as JSON Schema: the readers themselves say it.

A reader asks a `Fields` for each field with its type and bounds. Given a `SchemaFields` in its place, it finds every
field absent, and what it asked for is written down. So the description cannot differ from what is checked.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from services.gateway.errors import ApiError
from services.gateway.fields import Fields

Read = Callable[[Fields], object]


class SchemaFields(Fields):
    """A request without any field, which remembers what was asked of it.

    :param inside: the one object that is said to be there, empty; None: any. A reader may refuse it for what it lacks,
        so that it asks for nothing behind it.
    """

    def __init__(self, where: str = "", inside: str | None = "") -> None:
        super().__init__({}, where)
        self._inside = inside
        self._properties: dict[str, dict[str, Any] | SchemaFields] = {}
        self._required: list[str] = []

    def get(self, name: str, schema: Mapping[str, Any] | None = None, *, required: bool = False) -> Any:
        if schema is not None or name not in self._properties:
            self._properties[name] = dict(schema or {}) if required or schema is None else or_null(schema)
        if required and name not in self._required:
            self._required.append(name)
        return None

    def integer(self, name: str, low: int, high: int, *, off: Any = None) -> int | None:
        schema: dict[str, Any] = {"type": ["integer", "null"], "minimum": low, "maximum": high}
        self._properties[name] = schema if off is None else {"anyOf": [schema, {"const": off}]}
        return None

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        lowest = "exclusiveMinimum" if above_low else "minimum"
        self._properties[name] = {"type": ["number", "null"], lowest: low, "maximum": high}
        return None

    def boolean(self, name: str, *, default: bool = False) -> bool:
        self._properties[name] = {"type": ["boolean", "null"]}
        return default

    def text(self, name: str) -> str | None:
        self._properties[name] = {"type": ["string", "null"]}
        return None

    def object(self, name: str) -> Fields | None:
        nested = SchemaFields(self.path(name) + ".", None)
        self._properties[name] = nested
        return nested if self._inside in (name, None) else None

    def add(self, read: Read, but_for: Collection[str]) -> None:
        """What `read` asks for, as optional, without some."""
        apart = SchemaFields(inside=self._inside)
        with suppress(ApiError):
            read(apart)
        self._properties |= {name: found for name, found in apart._properties.items() if name not in but_for}

    @property
    def objects(self) -> list[str]:
        """Fields that are objects."""
        return [name for name, found in self._properties.items() if isinstance(found, SchemaFields)]

    def take(self, name: str, other: "SchemaFields") -> None:
        """What `other` has learned of the object `name`."""
        self._properties[name] = other._properties[name]

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


def request_schema(reads: Sequence[Read], refused: Mapping[str, Sequence[Any]] | None = None) -> dict[str, Any]:
    """What these readers take.

    :param refused: as `SchemaFields.schema`.
    """
    whole = _asked(reads, "")
    for name in whole.objects:
        whole.take(name, _asked(reads, name))
    return whole.schema(refused)


def but_for(read: Read, names: Collection[str]) -> Read:
    """A reader of what `read` may take, without these fields, and of none that it needs. For descriptions only."""

    def rest(fields: Fields) -> None:
        assert isinstance(fields, SchemaFields)
        fields.add(read, names)

    return rest


def _asked(reads: Sequence[Read], inside: str) -> SchemaFields:
    fields = SchemaFields(inside=inside)
    for read in reads:
        with suppress(ApiError):  # a field that a request cannot be without, or an object that lacks something
            read(fields)
    return fields


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, or null, which counts as absent."""
    return {"anyOf": [dict(schema), {"type": "null"}]}
