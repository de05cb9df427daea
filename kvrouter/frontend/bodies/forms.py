"""The fields of a form (multipart/form-data), found without copying its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvrouter.errors import BadRequestError
from kvrouter.frontend.bodies import lax

FORM = "multipart/form-data"
# Parts of a form in which fields are searched: bounds the work for a hostile body.
_MAX_PARTS = 64
_NAME = re.compile(rb';\s*name="?([^";\r\n]*)', re.IGNORECASE)
_BOUNDARY = re.compile(r';\s*boundary="?([^";]+)', re.IGNORECASE)
# vLLM reads this part as a JSON object. A longer one is no list of arguments.
_ARGUMENTS = b"vllm_xargs"
_MOST_ARGUMENTS_BYTES = 64 * 1024


class Part(NamedTuple):
    name: bytes
    at: int
    """Where its delimiter begins."""
    start: int
    """Of its value."""
    end: int


def parts_of(body: bytes, content_type: str) -> Iterator[Part]:
    """The parts that have a name. Malformed forms end early: the engine rejects them."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return
    delimiter = b"--" + boundary[1].encode("utf-8", "surrogateescape")
    start = body.find(delimiter)
    for _ in range(_MAX_PARTS):
        head_end = body.find(b"\r\n\r\n", start)
        end = body.find(b"\r\n" + delimiter, start + 1)
        if start < 0 or head_end < 0 or end < 0:
            return
        name = _NAME.search(body, start, head_end)
        if name is not None and head_end < end:
            yield Part(name[1], start, head_end + len(b"\r\n\r\n"), end)
        start = end + len(b"\r\n")


def guarded_in(part: Part, body: bytes) -> set[str]:
    """The kinds of fields in a part that no client may send."""
    if kind := lax.kind_of(part.name.partition(b"[")[0].decode("utf-8", "replace")):
        return {kind}
    if part.name != _ARGUMENTS or part.end - part.start > _MOST_ARGUMENTS_BYTES:
        return set()
    try:
        return lax.guarded_in(lax.fields_of(body[part.start : part.end]))
    except BadRequestError:
        return set()  # not what an engine takes


def without_guarded(content_type: str, body: bytes) -> bytes:
    """The form without such parts, and without such fields in its `vllm_xargs`."""
    pieces, at = [], 0
    for part in parts_of(body, content_type):
        if not guarded_in(part, body):
            continue
        if part.name == _ARGUMENTS:
            kept = lax.without_guarded(lax.fields_of(body[part.start : part.end]))
            pieces += [body[at : part.start], msgspec.json.encode(kept)]
            at = part.end
        else:
            pieces.append(body[at : part.at])
            at = part.end + len(b"\r\n")
    return b"".join([*pieces, body[at:]])
