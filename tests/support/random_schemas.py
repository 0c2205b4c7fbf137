"""Random JSON schemas whose texts are bounded, each with what a validator needs."""

import random
from typing import Any

_NAMES = ("id", "name", "né", "a b", 'q"', "tags", "$ref-like", "x_1")


def random_schema(seed: int) -> dict[str, Any]:
    """Return a schema of an object; the same seed gives the same one."""
    return _object(random.Random(seed), 2)


def _object(choose: random.Random, depth: int) -> dict[str, Any]:
    names = choose.sample(_NAMES, choose.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(choose, depth) for name in names},
        "required": [name for name in names if choose.random() < 0.7],
        "additionalProperties": False,
    }


def _value(choose: random.Random, depth: int) -> dict[str, Any]:
    kinds = ("string", "pattern", "integer", "enum", "const", "null", "boolean", "date", "number")
    kind = choose.choice((*kinds, *("array", "object", "anyOf") * (depth > 0)))
    match kind:
        case "string":
            return {"type": "string", "maxLength": choose.randint(0, 12)}
        case "pattern":
            return {"type": "string", "pattern": "^[a-f]{1,4}(-[0-9]{2}){0,2}$"}
        case "integer":
            low = choose.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 5000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 1}
        case "enum":
            return {"enum": ["red", "gr\nün", 3, None, [1, 2]][: choose.randint(1, 5)]}
        case "const":
            return {"const": choose.choice(["x", 0, True, {"k": [None]}])}
        case "date":
            return {"type": "string", "format": "date"}
        case "array":
            few = choose.randint(0, 2)
            items = _value(choose, depth - 1)
            return {"type": "array", "items": items, "minItems": few, "maxItems": few + 2}
        case "object":
            return _object(choose, depth - 1)
        case "anyOf":
            return {"anyOf": [_value(choose, depth - 1), {"type": "null"}]}
        case _:
            return {"type": kind}
