"""Schemas that the grammar library does not hold to."""

from typing import Any

import pytest

from shared.errors import GrammarError
from shared.schema_limits import check_schema

LARGE = 2**63
BAD: list[tuple[dict[str, Any], str]] = [
    ({"minProperties": 2}, "minProperties"),
    ({"minProperties": 3, "required": ["a", "b"]}, "minProperties"),
    ({"minProperties": 2, "required": ["a", "a"]}, "minProperties"),
    ({"maxProperties": 2}, "maxProperties"),
    ({"maxProperties": 1, "properties": {"a": {}, "b": {}}, "additionalProperties": False}, "maxProperties"),
    ({"const": LARGE}, "const"),
    ({"const": {"a": [1, -LARGE - 1]}}, "const"),
    ({"enum": [1, 10**30]}, "enum"),
    ({"minimum": LARGE}, "minimum"),
    ({"maximum": 1e30}, "maximum"),
    ({"minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"exclusiveMaximum": False}, "exclusiveMaximum"),
]
GOOD: list[Any] = [
    True,
    False,
    {"minProperties": 1, "maximum": 2**63 - 1, "exclusiveMinimum": 0},
    {"minProperties": 2, "required": ["a", "b"]},
    {"maxProperties": 1, "properties": {"a": {}}, "additionalProperties": False},
    {"properties": {"minProperties": {}, "maxProperties": {"type": "integer"}}},
    {"const": {"maxProperties": 2, "exclusiveMinimum": True}},
    {"enum": [{"minProperties": 5}], "default": {"maxProperties": 1}, "examples": [LARGE]},
    {"minProperties": "many", "properties": 5, "anyOf": {}, "$ref": "#/none/of/it", "required": 7},
]


@pytest.mark.parametrize(("schema", "keyword"), BAD)
def test_a_schema_that_would_be_broken_is_refused_wherever_it_stands(schema: dict[str, Any], keyword: str):
    """At the top, below each kind of keyword, and behind a reference; the message names the keyword."""
    places: list[Any] = [
        schema,
        {"properties": {"a": schema}},
        {"items": schema},
        {"prefixItems": [{}, schema]},
        {"additionalProperties": {"anyOf": [True, schema]}},
        {"$defs": {"d": schema}},
        {"$ref": "#/own/a~1b/0", "own": {"a/b": [schema]}},
    ]
    for place in places:
        with pytest.raises(GrammarError, match=keyword):
            check_schema(place)


@pytest.mark.parametrize("schema", GOOD)
def test_other_schemas_are_let_through(schema: Any):
    """Names of properties and constants are no keywords; what is malformed, the library refuses."""
    check_schema(schema)


def test_a_schema_may_be_deep_and_refer_to_itself():
    """The walk ends, and needs no stack."""
    schema: dict[str, Any] = {"$ref": "#/properties/self", "properties": {"self": {"$ref": "#/properties/self"}}}
    deep: dict[str, Any] = {"maxProperties": 1}
    for _ in range(5000):
        deep = {"items": deep}
    check_schema(schema)
    with pytest.raises(GrammarError):
        check_schema(schema | deep)
