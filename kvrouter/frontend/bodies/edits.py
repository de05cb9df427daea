"""What is changed in a client's body before a worker gets it. Every value that stays keeps its bytes.

    `kvrouter`, `nvext`                       the client's overrides: removed
    `cache_salt`                              that of `nvext`, if the body has none
    `vllm_xargs.kv_cache_report_mode`         removed from what clients send
                                              set to "full" for a partial rank
    `request_id` of /v1/responses             added, so that the response's id is known

With this mode vLLM announces blocks that a request reuses as if it stored them again. Agents count stores, so
a client that sets it would let their counts grow without end. A partial rank is asked with it on purpose: its
agent learns the blocks whose events it missed (docs/concepts/design.md#agent-state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvrouter.errors import BadRequestError
from kvrouter.frontend.bodies.openai import CompletionRequest

Edit: TypeAlias = Callable[[bytes], bytes]

_ARGUMENTS = "vllm_xargs"
_MODE = "kv_cache_report_mode"
_FULL = Raw(b'"full"')
_NULL = Raw(b"null")
_ASKING = b'{"vllm_xargs":{"kv_cache_report_mode":"full"}'

# Values stay bytes: numbers beyond 64 bits, escapes and 1.50 reach the engine as the client wrote them.
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def edits_of(request: CompletionRequest) -> list[Edit]:
    """The edits that a client's body needs; usually none."""
    edits: list[Edit] = []
    if request.kvrouter is not None:
        edits.append(without_overrides)
    if request.nvext is not None:
        edits.append(partial(without_nvext, salt=request.nvext.cache_salt))
    if _names_mode(request.engine_arguments):
        edits.append(without_report_mode)
    return edits


def apply(edits: Iterable[Edit], body: bytes) -> bytes:
    for edit in edits:
        body = edit(body)
    return body


def without_overrides(body: bytes) -> bytes:
    """The JSON body without its `kvrouter` object. Raises BadRequestError."""
    fields = _fields(body)
    del fields["kvrouter"]
    return msgspec.json.encode(fields)


def without_nvext(body: bytes, *, salt: str | None) -> bytes:
    """The JSON body without its `nvext` object, whose salt becomes the body's. Raises BadRequestError."""
    fields = _fields(body)
    del fields["nvext"]
    if salt and bytes(fields.get("cache_salt", _NULL)) in {b"null", b'""'}:
        fields["cache_salt"] = Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


def without_report_mode(body: bytes) -> bytes:
    """The JSON body without the report mode, which is there. Raises BadRequestError."""
    fields = _fields(body)
    arguments = _decode_fields(fields[_ARGUMENTS])
    del arguments[_MODE]
    return msgspec.json.encode(fields | {_ARGUMENTS: arguments})


def with_report_mode(body: bytes, *, has_arguments: bool) -> bytes:
    """The body of a request that has been parsed, with report mode "full".

    A body whose `vllm_xargs` are not an object stays as it is: the engine rejects it.
    """
    if not has_arguments:  # nearly all: no second pass over the body
        rest = body.lstrip()[1:].lstrip()
        return b"".join((_ASKING, b"" if rest.startswith(b"}") else b",", rest))
    fields = _fields(body)
    try:
        arguments = msgspec.json.decode(fields[_ARGUMENTS], type=dict[str, Raw] | None)
    except msgspec.ValidationError:
        return body
    return msgspec.json.encode(fields | {_ARGUMENTS: (arguments or {}) | {_MODE: _FULL}})


def with_request_id(body: bytes, request_id: str) -> bytes:
    """The body of a /v1/responses request, which has no `request_id`: vLLM gives the response this id."""
    rest = body.lstrip()[1:].lstrip()
    return b"".join(
        (b'{"request_id":"%b"' % request_id.encode(), b"" if rest.startswith(b"}") else b",", rest)
    )


def _names_mode(arguments: Raw | UnsetType) -> bool:
    if arguments is UNSET:
        return False
    try:
        return _MODE in _decode_fields(arguments)
    except msgspec.ValidationError:
        return False  # not an object


def _fields(body: bytes) -> dict[str, Raw]:
    try:
        return _decode_fields(body)
    except UnicodeDecodeError as error:  # in a name: parsing the request did not look at it
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
