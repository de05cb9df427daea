"""What is changed in a client's body before a worker gets it. Every value that stays keeps its bytes.

    `kvrouter`, `nvext`                       the client's overrides: removed
    `cache_salt`                              that of `nvext`, if the body has none
    `priority`                                removed with --client-overrides off
    what no client may send (lax.py)          removed, also inside `vllm_xargs`
    `kv_transfer_params.prompt_token_ids`     added: the ids of a chat that were computed here
    `request_id` of /v1/responses             added, so that the response's id is known

One of them is `vllm_xargs.kv_cache_report_mode`: with it vLLM announces blocks that a request reuses as if it
stored them again. Agents count stores, so a client that sets it would let their counts grow without end.

Values stay bytes: numbers beyond 64 bits, escapes and 1.50 reach the engine as the client wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Raw

from kvrouter.bodies import lax
from kvrouter.bodies.openai import TRANSFER, CompletionRequest

Edit: TypeAlias = Callable[[bytes], bytes]

# Written in one step: 1 ms.
_IDS_SLICE = 16_384
_ARGUMENTS = "vllm_xargs"
_NULL = Raw(b"null")


def edits_of(request: CompletionRequest) -> list[Edit]:
    """The edits that a client's body needs; usually none."""
    edits: list[Edit] = []
    if request.kvrouter is not None:
        edits.append(without_overrides)
    if request.nvext is not None:
        edits.append(partial(without_nvext, salt=request.nvext.cache_salt))
    if removed_from(request):
        edits.append(request.remove or without_guarded)
        if request.token_ids is not None:
            edits.append(partial(with_field, field=lax.at_once(token_ids_field(request.token_ids))))
    return edits


def apply(edits: Iterable[Edit], body: bytes) -> bytes:
    edited = body
    for edit in edits:
        edited = edit(edited)
    return lax.with_nan(edited, body)


def without_overrides(body: bytes) -> bytes:
    """The JSON body without its `kvrouter` object. Raises BadRequestError."""
    fields = lax.fields_of(body)
    del fields["kvrouter"]
    return msgspec.json.encode(fields)


def without_nvext(body: bytes, *, salt: str | None) -> bytes:
    """The JSON body without its `nvext` object, whose salt becomes the body's. Raises BadRequestError."""
    fields = lax.fields_of(body)
    del fields["nvext"]
    if salt and bytes(fields.get("cache_salt", _NULL)) in {b"null", b'""'}:
        fields["cache_salt"] = Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


def may_have_priority(body: bytes) -> bool:
    """Whether it may have a field `priority`, perhaps written with escapes."""
    return b'"priority"' in body or b"\\u" in body


def without_priority(body: bytes) -> bytes:
    """The JSON body without the priority that engines read. Raises BadRequestError."""
    fields = lax.fields_of(body)
    return msgspec.json.encode(fields) if fields.pop("priority", None) is not None else body


def removed_from(request: CompletionRequest) -> set[str]:
    """The kinds of fields that the client sent and may not send."""
    found = set(request.removed)
    if request.engine_arguments is not UNSET:
        found |= lax.guarded_in({_ARGUMENTS: request.engine_arguments})
    return found


def without_guarded(body: bytes) -> bytes:
    """The JSON body without the fields that no client may send. Raises BadRequestError."""
    return msgspec.json.encode(lax.without_guarded(lax.fields_of(body)))


def token_ids_field(ids: Sequence[int]) -> Generator[None, None, bytes]:
    """Returns the field by which vLLM takes token ids in place of a chat's messages (from 0.32 on).

    Yields between slices of the ids.
    """
    written = []
    for start in range(0, len(ids), _IDS_SLICE):
        if start:
            yield
        written.append(msgspec.json.encode(list(ids[start : start + _IDS_SLICE]))[1:-1])
    return b'"%b":{"prompt_token_ids":[%b]}' % (TRANSFER.encode(), b",".join(written))


def with_field(body: bytes, field: bytes) -> bytes:
    """The JSON object with one more field. It is the last one: of two with one name the last one counts."""
    rest = body.rstrip()[:-1].rstrip()
    return b"%b%b%b}" % (rest, b"" if rest.endswith(b"{") else b",", field)


def with_request_id(body: bytes, request_id: str) -> bytes:
    """The body of a /v1/responses request, which has no `request_id`: vLLM gives the response this id."""
    rest = body.lstrip()[1:].lstrip()
    return b"".join(
        (b'{"request_id":"%b"' % request_id.encode(), b"" if rest.startswith(b"}") else b",", rest)
    )
