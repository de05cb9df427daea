"""--model-alias: other names of models. A worker gets the name that it serves; all other bytes stay.

    client   {"model": "gpt-4o", …}   ?model=gpt-4o   form field model=gpt-4o
    worker   {"model": "llama", …}    ?model=llama    form field model=llama

The engine checks the name: vLLM rejects one that it does not serve with 404. Its answer has its own name, as
that of a vLLM with several served names has the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote_plus

import msgspec
from msgspec import Raw, Struct

from kvrouter.errors import ConfigError
from kvrouter.frontend.bodies.forms import FORM, form_fields

# `"model": "…"` anywhere in a body. A quote in a string is escaped, so no text that contains it matches.
_MODEL = re.compile(rb'"model"[ \t\r\n]*+:[ \t\r\n]*+("(?:[^"\\]++|\\.)*+")', re.DOTALL)
# A body with more of them is encoded anew.
_MOST_PLACES = 64
_MARK = b'"kvrouter-place-%d"'


class _Named(Struct):
    model: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def read_alias(text: str) -> tuple[str, str]:
    """`NAME=MODEL`. A model's name may contain `=`."""
    alias, _, model = text.partition("=")
    if not alias or not model or (alias, model) != (alias.strip(), model.strip()):
        raise ValueError("must be NAME=MODEL")
    return alias, model


def resolved(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The model of each alias; an alias may name another one. Raises ConfigError."""
    given: dict[str, str] = {}
    for alias, model in pairs:
        if given.setdefault(alias, model) != model:
            raise ConfigError(
                f"--model-alias {alias}={model}: {alias} is an alias of {given[alias]} already; drop one"
            )
    return {alias: _end(given, alias) for alias in given}


def _end(given: Mapping[str, str], alias: str) -> str:
    seen = [alias]
    while (name := given[seen[-1]]) in given:
        if name in seen:
            circle = " = ".join([*seen, name])
            raise ConfigError(f"--model-alias {circle}: these names lead to no model; name one of a worker")
        seen.append(name)
    return name


def renamed(body: bytes, *, content_type: str, alias: str, model: str) -> bytes:
    """The body for a worker that serves `model`."""
    if content_type.partition(";")[0].strip().lower() == FORM:
        return _renamed_form(body, content_type, alias.encode(), model.encode())
    return _renamed_json(body, alias, msgspec.json.encode(model)) if body else body


def _renamed_form(body: bytes, content_type: str, alias: bytes, model: bytes) -> bytes:
    parts, at = [], 0
    for name, start, end in form_fields(body, content_type):
        if name == b"model" and body[start:end] == alias:
            parts += [body[at:start], model]
            at = end
    return b"".join([*parts, body[at:]])


def _renamed_json(body: bytes, alias: str, model: bytes) -> bytes:
    if _decoded_name(body) != alias:
        return body
    places = [found.span(1) for found in _MODEL.finditer(body)]
    if len(places) <= _MOST_PLACES:
        named = _decoded_name(_replaced(body, {place: _MARK % at for at, place in enumerate(places)}))
        for at, place in enumerate(places):
            if named == (_MARK % at)[1:-1].decode():  # the others belong to tools, messages, …
                return _replaced(body, {place: model})
    return msgspec.json.encode(_decode_fields(body) | {"model": Raw(model)})


def _decoded_name(body: bytes) -> str | None:
    """None: the body is not valid JSON, and the engine rejects it, or names no model."""
    try:
        return _decode_named(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _replaced(body: bytes, by_place: Mapping[tuple[int, int], bytes]) -> bytes:
    parts, at = [], 0
    for (start, end), text in by_place.items():
        parts += [body[at:start], text]
        at = end
    return b"".join([*parts, body[at:]])


def renamed_target(target: str, alias: str, model: str) -> str:
    """A path whose query names the alias, with the model's name in its place."""
    path, mark, query = target.partition("?")
    fields = [field.partition("=") for field in query.split("&")]
    is_alias = [unquote_plus(name) == "model" and unquote_plus(value) == alias for name, _, value in fields]
    if not any(is_alias):
        return target
    new = [
        f"model={quote(model, safe='')}" if found else "".join(field)
        for field, found in zip(fields, is_alias, strict=True)
    ]
    return f"{path}{mark}{'&'.join(new)}"
