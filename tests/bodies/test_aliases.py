"""Bodies, forms and queries that name an alias, and what a worker gets of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.bodies.aliases import read_alias, renamed, renamed_target, resolved
from kvrouter.errors import ConfigError

ALIAS, MODEL = "gpt-4o", 'llama "3" é'
JSON = "application/json"
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.sampled_from([ALIAS, '"model": "gpt-4o"', '\\"model": "gpt-4o"', "kvrouter-place-0", "model"]),
)
KEYS = st.sampled_from(["model", "messages", '"model"', 'a"model', "tools", "é"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def to_worker(body: bytes, content_type: str = JSON) -> bytes:
    return renamed(body, content_type=content_type, alias=ALIAS, model=MODEL)


@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.integers(0, 4),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", "\t: ")]),
)
@example({"messages": [{"model": ALIAS}]}, 1, None, True, (", ", ": "))
def test_only_the_name_changes(
    rest: dict[str, Any], at: int, indent: int | None, is_ascii: bool, separators: tuple[str, str]
) -> None:
    """Every other value stays, wherever else the word or the name stands."""
    items = [(key, value) for key, value in rest.items() if key != "model"]
    mark = "0123-mark-3210"

    def text(name: str) -> str:
        fields = dict([*items[:at], ("model", name), *items[at:]])
        return json.dumps(fields, ensure_ascii=is_ascii, indent=indent, separators=separators)

    before, after = text(mark).replace(mark, ALIAS), text(mark)
    assert json.loads(to_worker(before.encode())) == {**json.loads(after), "model": MODEL}


@pytest.mark.parametrize(
    "body",
    [
        b'{"mod\\u0065l":"gpt-4o","x":1.50}',
        b'{"model":"gpt\\u002d4o","x":1.50}',
        b'{"model":"other","x":1.50,"model":"gpt-4o"}',
        b'{"x":1.50,"tools":[' + b'{"model":"gpt-4o"},' * 100 + b'0],"model":"gpt-4o"}',
    ],
    ids=["key", "value", "twice", "many"],
)
def test_other_spellings(body: bytes) -> None:
    """Escapes, and the last of several fields of one name, which engines read."""
    found = to_worker(body)

    assert json.loads(body) | {"model": MODEL} == json.loads(found)
    assert b"1.50" in found


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"model"', b"[" * 100_000])
def test_no_object(body: bytes) -> None:
    """What is no object stays: the query names the model, or the engine replies with the reason."""
    assert body == to_worker(body)


FILE = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n'
FIELD = b'--B\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


@given(
    st.lists(
        st.one_of(
            st.sampled_from([b"gpt-4o", b'name="model"\r\n\r\ngpt-4o', b"\r\n", b"\x00"]).map(
                lambda it: FILE % it
            ),
            st.tuples(
                st.sampled_from([b"model", b"model_x", b"language"]), st.sampled_from([b"gpt-4o", b"x", b""])
            ).map(lambda it: FIELD % it),
        ),
        max_size=5,
    )
)
def test_forms(parts: list[bytes]) -> None:
    """Of a form only the field `model` changes, not files and not other fields."""
    body = b"".join(parts) + b"--B--\r\n"
    wanted = [
        FIELD % (b"model", MODEL.encode()) if one == FIELD % (b"model", b"gpt-4o") else one for one in parts
    ]

    assert b"".join(wanted) + b"--B--\r\n" == to_worker(body, "Multipart/Form-Data; boundary=B")


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("/v1/x", "/v1/x"),
        ("/v1/x?model=other&a=gpt-4o", "/v1/x?model=other&a=gpt-4o"),
        ("/v1/x?a=%20&model=gpt-4o&b", "/v1/x?a=%20&model=llama%20%223%22%20%C3%A9&b"),
        ("/model=gpt-4o?mod%65l=gpt%2D4o", "/model=gpt-4o?model=llama%20%223%22%20%C3%A9"),
    ],
)
def test_queries(target: str, wanted: str) -> None:
    """Of a query only the value of `model` changes."""
    assert wanted == renamed_target(target, ALIAS, MODEL)


def test_resolved() -> None:
    """An alias may name another one; several may name one model; equal pairs count once."""
    pairs = [("a", "b"), ("b", "m"), ("c", "m"), ("c", "m")]

    assert {"a": "m", "b": "m", "c": "m"} == resolved(pairs)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("a", "a")], "--model-alias a = a: these names lead to no model"),
        ([("a", "b"), ("b", "a")], "--model-alias a = b = a: these"),
        ([("x", "a"), ("a", "b"), ("b", "a")], "--model-alias x = a = b = a: these"),
        ([("a", "b"), ("a", "c")], "--model-alias a=c: a is an alias of b already; drop one"),
    ],
)
def test_circles(pairs: list[tuple[str, str]], words: str) -> None:
    """Aliases that lead to no model, or to two, end the start."""
    with pytest.raises(ConfigError, match=words):
        resolved(pairs)


@pytest.mark.parametrize("text", ["", "a", "=", "a=", "=b", " a=b", "a=b ", "a =b"])
def test_wrong_pairs(text: str) -> None:
    """Both names must be there."""
    with pytest.raises(ValueError, match="must be NAME=MODEL"):
        read_alias(text)


def test_equals_sign_in_a_model() -> None:
    """A model's name may contain `=`."""
    assert ("a", "org/m=1") == read_alias("a=org/m=1")
