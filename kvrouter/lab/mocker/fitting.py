"""What a model computes and the mocker makes up: values that fit a JSON schema, and embeddings.

Understood: `$ref` within the schema, `enum`, `const`, `anyOf`, `oneOf`, `allOf`, types, bounds of numbers and
lengths, required properties, items, and the formats of dates, times, addresses and ids. Patterns are not.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from operator import ge, gt, le, lt
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvrouter.errors import BadRequestError

# Characters of a token of JSON; numbers of an embedding.
PIECE, DIMENSIONS = 4, 64
MOST_DEPTH = 32
# Items of a list, properties of an object, characters of a string.
MOST = 1_000
_BOUNDS = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}
_STRINGS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def fitting(schema: object) -> Any:
    """A small value that fits. Raises BadRequestError for a schema that needs too much, or is none."""
    try:
        return _Fitting(schema).value(schema, 0)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadRequestError(f"the JSON schema is none: {error}") from error


def pieces_of(schema: object) -> list[str]:
    """A value that fits as JSON, by token; empty without a schema."""
    if isinstance(schema, str):  # as vLLM takes it, too
        schema = msgspec.json.decode(schema)
    text = "" if schema is None else msgspec.json.encode(fitting(schema)).decode()
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def vector(tokens: Sequence[int], dimensions: int) -> array[float]:
    """Of length 1, always the same for these tokens."""
    chance = random.Random(xxh3_64_intdigest(array("I", tokens).tobytes()))
    numbers = [chance.gauss(0, 1) for _ in range(dimensions)]
    return array("f", [number / math.hypot(*numbers) for number in numbers])


class _Fitting:
    """One schema."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._left = MOST

    def value(self, schema: object, depth: int) -> Any:
        self._left -= 1
        if depth > MOST_DEPTH or self._left < 0:
            raise BadRequestError(f"the JSON schema needs more than {MOST_DEPTH} levels or {MOST} values")
        if not isinstance(schema, Mapping):
            return "mock"
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        choice: Any = schema.get("anyOf") or schema.get("oneOf")
        if "$ref" in schema or choice:
            return self.value(self._named(schema["$ref"]) if "$ref" in schema else choice[0], depth + 1)
        if schema.get("allOf"):
            return self._of_all(schema["allOf"], depth + 1)
        return self._of_type(schema, depth + 1)

    def _named(self, reference: str) -> object:
        found = self._root
        for part in filter(None, reference.removeprefix("#").split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            raise BadRequestError(f"the JSON schema has no {reference[:100]!r}")
        return found

    def _of_all(self, parts: list[object], depth: int) -> Any:
        values = [self.value(part, depth) for part in parts]
        if all(isinstance(value, dict) for value in values):
            return {name: one for value in values for name, one in value.items()}
        return values[0]

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "string")
        found: Any = None
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                properties, required = schema.get("properties", {}), schema.get("required", ())
                found = {name: self.value(properties.get(name), depth) for name in required}
            case "array":
                count = min(MOST, schema.get("minItems", 0))
                found = [self.value(schema.get("items"), depth) for _ in range(count)]
            case "integer":
                found = int(_bounded(schema, schema.get("multipleOf", 1)))
            case "number":
                found = _bounded(schema, schema.get("multipleOf", 0.125))
            case "boolean":
                found = True
            case "string":
                text = _STRINGS.get(schema.get("format", ""), "mock")
                found = text.ljust(min(MOST, schema.get("minLength", 0)), ".")[: schema.get("maxLength")]
        return found


def _bounded(schema: Mapping[str, Any], step: float) -> float:
    """The first multiple of the step near 0 or near a bound that is within all bounds."""
    bounds = [schema[name] for name in _BOUNDS if name in schema]
    near = [math.floor(one / step) + more for one in (0, *bounds) for more in (0, 1, -1)]
    return next(
        (
            n * step
            for n in near
            if all(_BOUNDS[name](n * step, schema[name]) for name in _BOUNDS if name in schema)
        ),
        0,
    )
