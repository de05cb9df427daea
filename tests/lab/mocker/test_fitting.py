"""What the mocker makes up fits the schemas that it was asked for."""

from __future__ import annotations

import math
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import BadRequestError
from kvrouter.lab.mocker.fitting import MOST, fitting, pieces_of, vector

_numbers = st.integers(-1000, 1000)
_bounds = st.tuples(_numbers, st.integers(2, 500)).map(lambda two: (two[0], two[0] + two[1]))
_integers: Any = st.builds(lambda two: {"type": "integer", "minimum": two[0], "maximum": two[1]}, _bounds)
_exclusive: Any = st.builds(
    lambda two, kind: {"type": kind, "exclusiveMinimum": two[0], "exclusiveMaximum": two[1]},
    _bounds,
    st.sampled_from(["integer", "number"]),
)
_strings = st.builds(
    lambda least, more, form: {"type": "string", "minLength": least, "maxLength": least + more} | form,
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from([{}, {"description": "d"}]),
)
_formats = st.sampled_from(["date", "date-time", "time", "email", "hostname", "ipv4", "uri", "uuid"]).map(
    lambda name: {"type": "string", "format": name}
)
_plain = st.sampled_from(
    [{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {}, True, {"const": {"a": [1]}}]
) | st.lists(st.integers() | st.text(), min_size=1).map(lambda values: {"enum": values})


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.text(max_size=5), inner, max_size=4).flatmap(
        lambda properties: st.builds(
            lambda required: {"type": "object", "properties": properties, "required": required},
            st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
        )
    )
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 3)
    )
    chosen = st.builds(
        lambda name, parts: {name: parts}, st.just("anyOf"), st.lists(inner, min_size=1, max_size=3)
    )
    return objects | arrays | chosen | objects.map(lambda one: {"allOf": [one]})


_unnamed = st.recursive(_integers | _exclusive | _strings | _formats | _plain, _nested, max_leaves=12)
SCHEMAS = _unnamed | _unnamed.map(lambda one: {"$defs": {"a/b": one}, "$ref": "#/$defs/a~1b"})


@given(SCHEMAS)
def test_values_fit(schema: Any) -> None:
    """Any schema of the kinds that are understood."""
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)

    assert validator.is_valid(fitting(schema)), fitting(schema)


def test_references() -> None:
    """As pydantic writes models within models."""
    schema = {
        "$defs": {
            "City": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        },
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/City"}, "to": {"anyOf": [{"$ref": "#/$defs/City"}]}},
        "required": ["from", "to"],
    }

    assert {"from": {"name": "mock"}, "to": {"name": "mock"}} == fitting(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$ref": "#/nowhere"},
        {"$ref": 7},
        {"type": "object", "required": 7},
        {"type": "array", "minItems": MOST, "items": {"type": "array", "minItems": MOST, "items": {}}},
        {"type": "array", "minItems": "many"},
        {"type": "integer", "multipleOf": 0},
        {"allOf": 7},
        {"enum": 7},
    ],
)
def test_schemas_without_a_value(schema: Any) -> None:
    """Endless ones, huge ones, and what is no schema."""
    with pytest.raises(BadRequestError, match="JSON schema"):
        fitting(schema)


def test_pieces() -> None:
    """They join to the JSON; vLLM takes the schema as text, too."""
    schema = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'

    assert '{"city":"mock"}' == "".join(pieces_of(schema))
    assert [] == pieces_of(None)


def test_vectors() -> None:
    """Of length 1; equal only for equal tokens."""
    one, other = vector([1, 2, 3], 8), vector([1, 2, 4], 8)

    assert 1 == pytest.approx(math.hypot(*one), abs=1e-6)
    assert one == vector([1, 2, 3], 8) != other
