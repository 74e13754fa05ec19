"""Random JSON schemas whose every text is short: nested objects, arrays, enums, bounds, patterns, anyOf, references."""

import random
from typing import Any

Schema = dict[str, Any]
_NAMES = ["name", "age", "city", "tags", "id", "unit", "note", "über", "a b", "size", "kind", "x-y"]
_PATTERNS = [r"^[A-Z]{2}-\d{3}$", r"^(red|green|blue)$", r"^[a-f0-9]{4,8}$", r"^\d{4}-\d{2}$", r"^[^\s]{1,5}$"]
_FORMATS = ["date", "uuid", "ipv4"]


def random_schema(seed: int) -> Schema:
    """An object at the top, as OpenAI's strict mode asks."""
    rng = random.Random(seed)
    definitions = {f"d{i}": _value(rng, 1, ()) for i in range(rng.randrange(3))}
    schema = _object(rng, 3, tuple(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _value(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    makers = [_string, _integer, _number, _enum, _constant]
    if depth > 0:
        makers += [_array, _object, _any_of]
    if refs:
        makers.append(_ref)
    return rng.choice(makers)(rng, depth - 1, refs)


def _string(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 9)}


def _integer(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    low = rng.randrange(-200, 200)
    bounds = {"minimum": low, "maximum": low + rng.randrange(0, 400)}
    if rng.randrange(3) == 0:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randrange(2, 100)}
    return {"type": "integer", **bounds}


def _number(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    low = rng.randrange(-9, 9)
    return {"type": "number", "minimum": low, "maximum": low + rng.randrange(1, 20), "multipleOf": 0.25}


def _enum(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    values = ["a", 'q"', "ü", 1, -2.5, True, None, "two words", [1, 2], {"k": "v"}]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _constant(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": "fixed\nline"}])


def _array(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    low = rng.randrange(3)
    schema: Schema = {"type": "array", "items": _value(rng, depth, refs), "minItems": low, "maxItems": low + 1}
    if rng.randrange(4) == 0:
        schema = {"type": "array", "prefixItems": [_value(rng, 0, refs), _value(rng, 0, refs)], "items": False}
    return schema


def _object(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    required = [name for name in names if rng.randrange(3)]
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1, refs) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    return {"anyOf": [_value(rng, depth, refs) for _ in range(rng.randint(2, 3))]}


def _ref(rng: random.Random, depth: int, refs: tuple[str, ...]) -> Schema:
    return {"$ref": f"#/$defs/{rng.choice(refs)}"}
