"""JSON schemas that llguidance accepts and does not hold to: they are refused, since an answer would break them."""

from typing import Any, TypeGuard

from shared.errors import GrammarError

_ONE = ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames")
_ONE_MORE = ("unevaluatedProperties", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_BOUNDS = ("minimum", "maximum", *_EXCLUSIVE, "multipleOf")
_MAX_INT = 2**63 - 1


def check_schema(root: Any) -> None:
    """Looks at keywords only where a schema stands, also behind references into `root`.

    :raises GrammarError: with the keyword and the reason.
    """
    waiting, seen = [root], set[int]()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        _check_one(schema)
        waiting += [schema[name] for name in (*_ONE, *_ONE_MORE) if name in schema]
        waiting += [item for name in _LISTS if isinstance(part := schema.get(name), list) for item in part]
        waiting += [item for name in _MAPS if isinstance(part := schema.get(name), dict) for item in part.values()]
        waiting.append(_referred(root, schema.get("$ref")))


def _check_one(schema: dict[str, Any]) -> None:
    for name in _EXCLUSIVE:
        if isinstance(schema.get(name), bool):
            raise GrammarError(f"{name} must be a number: true and false are of draft 4, which is not supported")
    for name in (*_BOUNDS, "const", "enum"):
        if name in schema and _has_large_number(schema[name]):
            raise GrammarError(f"{name} holds a number beyond 64 bits, which is not supported")
    required = schema.get("required")
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    if _is_number(least) and least > max(1, len(set(map(str, required))) if isinstance(required, list) else 0):
        raise GrammarError("minProperties above 1 and above the number of required properties is not supported")
    if most is not None and not _is_idle(schema, most):
        raise GrammarError("maxProperties is not supported")


def _is_idle(schema: dict[str, Any], most: Any) -> bool:
    """Whether no object could have more properties anyway."""
    named = schema.get("properties", {})
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return closed and isinstance(named, dict) and _is_number(most) and most >= len(named)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_large_number(value: Any) -> bool:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if _is_number(part) and not -_MAX_INT <= part <= _MAX_INT:
            return True
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
    return False


def _referred(root: Any, ref: Any) -> Any:
    """What a reference into the schema itself points at; None: it is no such reference, or points at nothing."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    part = root
    for step in ref[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        elif isinstance(part, dict) and key in part:
            part = part[key]
        else:
            return None
    return part
