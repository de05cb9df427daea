"""--model-alias: other names of models. A worker gets the name that it serves; other values keep their bytes.

    client   {"model": "gpt-4o", …}   ?model=gpt-4o   form field model=gpt-4o
    worker   {"model": "llama", …}    ?model=llama    form field model=llama

The engine checks the name: vLLM rejects one that it does not serve with 404. Its answer has its own name, as
that of a vLLM with several served names has the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote_plus

import msgspec
from msgspec import Raw

from kvrouter.bodies.forms import FORM, parts
from kvrouter.bodies.lax import fields_of
from kvrouter.errors import BadRequestError, ConfigError


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
    try:
        fields = fields_of(body)
    except BadRequestError:
        return body  # no object: its query names the model
    return msgspec.json.encode(fields | {"model": Raw(msgspec.json.encode(model))})


def _renamed_form(body: bytes, content_type: str, alias: bytes, model: bytes) -> bytes:
    pieces, at = [], 0
    for part in parts(body, content_type):
        if "model" in part.names and body[part.value_at : part.end] == alias:
            pieces += [body[at : part.value_at], model]
            at = part.end
    return b"".join([*pieces, body[at:]])


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
