"""What the mocker makes up fits the schemas that it was asked for."""

from __future__ import annotations

import json
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

    assert validator.is_valid(json.loads(fitting(schema))), fitting(schema)


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

    assert {"from": {"name": "mock"}, "to": {"name": "mock"}} == json.loads(fitting(schema))


def test_parts_are_merged() -> None:
    """`allOf`, an alternative beside properties, and a list whose end is the second alternative."""
    required = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    both = {"allOf": [required, {"required": ["b"]}]}
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}

    assert {"a": None, "b": "mock"} == json.loads(fitting(both))
    assert {"a": None, "b": "mock"} == json.loads(fitting(required | {"anyOf": [{"required": ["b"]}]}))
    assert {"next": None} == json.loads(fitting(node | {"required": ["next"]}))
    assert 0 < json.loads(fitting({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.05})) < 0.05
    assert ["mock"] == json.loads(fitting({"type": "array", "minItems": 1.0}))


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
        "not json",
        {"type": []},
        {"type": "number", "minimum": 1e308, "multipleOf": 1e-308},
        {"type": "string", "minLength": 1_000_000},
        {"type": "array", "minItems": 900, "items": {"const": "x" * 40_000}},
        {"type": "integer", "minimum": 5, "maximum": 4},
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
