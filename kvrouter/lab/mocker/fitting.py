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
# Values, and characters of the JSON. Of one request: numbers of embeddings (about a second).
MOST, MOST_TEXT, MOST_NUMBERS = 1_000, 64 * 1024, 1 << 19
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
_NOTHING: Mapping[str, Any] = {}


def fitting(schema: object) -> str:
    """A small value that fits, as JSON. Raises BadRequestError for a schema that needs too much, or is none.

    vLLM takes a schema as text, too.
    """
    try:
        root = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        return msgspec.json.encode(_Fitting(root).value(root, 0)).decode()
    except BadRequestError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise BadRequestError(f"the JSON schema is none: {error}") from error


def pieces_of(schema: object) -> list[str]:
    """A value that fits as JSON, by token; empty without a schema."""
    text = "" if schema is None else fitting(schema)
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def vector(tokens: Sequence[int], dimensions: int) -> array[float]:
    """Of length 1, always the same for these tokens."""
    chance = random.Random(xxh3_64_intdigest(array("I", tokens).tobytes()))
    numbers = [chance.gauss(0, 1) for _ in range(dimensions)]
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers])


class _Fitting:
    """One schema."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._left, self._text_left = MOST, MOST_TEXT

    def value(self, schema: object, depth: int) -> Any:
        whole = self._merged(schema, depth)
        is_given = "const" in whole or "enum" in whole
        if is_given:
            found = whole["const"] if "const" in whole else whole["enum"][0]
        else:
            found = self._of_type(whole, depth + 1)
        if is_given or not isinstance(found, dict | list):  # else its parts have been counted
            self._text_left -= len(msgspec.json.encode(found))
        if self._text_left < 0:
            raise BadRequestError(f"the JSON schema needs more than {MOST_TEXT} characters")
        return found

    def _merged(self, schema: object, depth: int) -> Mapping[str, Any]:
        """The schema with what it refers to, and one of its alternatives: a finite one, if there is one."""
        self._left -= 1
        if depth > MOST_DEPTH or self._left < 0:
            raise BadRequestError(f"the JSON schema needs more than {MOST_DEPTH} levels or {MOST} values")
        if not isinstance(schema, Mapping):
            return _NOTHING
        parts = [*schema.get("allOf", ())]
        for name in ("anyOf", "oneOf"):
            if name in schema:
                parts.append(
                    min(schema[name], key=lambda one: "$ref" in one if isinstance(one, Mapping) else 0)
                )
        if "$ref" in schema:
            parts.append(self._named(schema["$ref"]))
        whole: dict[str, Any] = dict(schema)
        for part in parts:
            more = self._merged(part, depth + 1)
            properties = {**whole.get("properties", {}), **more.get("properties", {})}
            required = [*whole.get("required", ()), *more.get("required", ())]
            whole = {**whole, **more, "properties": properties, "required": required}
        return whole

    def _named(self, reference: str) -> object:
        found = self._root
        for part in filter(None, reference.removeprefix("#").split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            raise BadRequestError(f"the JSON schema has no {reference[:100]!r}")
        return found

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        is_object = schema.get("properties") or schema.get("required")
        kind = schema.get("type", "object" if is_object else "string")
        found: Any = None
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                properties = schema.get("properties", {})
                found = {
                    str(name): self.value(properties.get(name), depth) for name in schema.get("required", ())
                }
            case "array":
                count = min(MOST, int(schema.get("minItems", 0)))
                found = [self.value(schema.get("items"), depth) for _ in range(count)]
            case "integer":
                found = int(_bounded(schema, schema.get("multipleOf", 1)))
            case "number":
                found = _bounded(schema, schema.get("multipleOf", 0.125))
            case "boolean":
                found = True
            case "string":
                text = _STRINGS.get(schema.get("format", ""), "mock")
                length = min(MOST_TEXT + 1, int(schema.get("minLength", 0)))  # above the bound of the whole
                found = text.ljust(length, ".")[: schema.get("maxLength")]
        return found


def _bounded(schema: Mapping[str, Any], step: float) -> float:
    """The first multiple of the step near 0 or near a bound, or the middle, that is within all bounds."""
    bounds = {name: schema[name] for name in _BOUNDS if name in schema}
    tried: list[float] = [(one // step + more) * step for one in (0, *bounds.values()) for more in (0, 1, -1)]
    tried += [sum(bounds.values()) / len(bounds)] if bounds and "multipleOf" not in schema else []
    for one in tried:
        if math.isfinite(one) and all(_BOUNDS[name](one, bound) for name, bound in bounds.items()):
            return one
    raise BadRequestError("the JSON schema has bounds that no number was found for")
