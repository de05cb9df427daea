"""The bodies of calls. Large ones are read in slices, as a frontend reads those of its clients.

body ──scanned──> long lists, text ──read a slice at a time───────────┐
          └─ the rest, with null in their places ──parsed──> a call ──┴──> the whole call
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from kvrouter.bodies.reader import LARGE_BYTES, MOST_REST_BYTES, Hole, LargeBody, named_field, scanned
from kvrouter.bodies.scan import read_hashes
from kvrouter.errors import BadRequestError, RequestTooLargeError
from kvrouter.relay.request import Request
from kvrouter.router.asked import check_distinct, is_given

T = TypeVar("T")
Numbers = TypeVar("Numbers", "list[int]", "array[int]")

MOST_BODY_BYTES = 8 * 1024 * 1024
# What is done with a prompt once it is read takes steps of some ms with so many tokens.
MOST_TOKENS = 1 << 20
MOST_HASHES = 1 << 16
_HASHES = frozenset({"block_hashes", "sequence_hashes", "seq_hashes"})
_BLANKS = b" \t\r\n"
# What reads these cuts them into slices itself (frontend/requests/accept.py).
_RAW = frozenset({"messages", "request"})


async def read(request: Request, kind: type[T]) -> T:
    """The body. Raises BadRequestError."""
    return await read_body(await request.read(), kind)


async def read_body(body: bytes, kind: type[T]) -> T:
    if len(body) > MOST_BODY_BYTES:
        raise RequestTooLargeError(f"{len(body)} bytes: a body of this call has {MOST_BODY_BYTES} at most")
    fields: tuple[str, ...] | None = getattr(kind, "__struct_fields__", None)
    if len(body) <= LARGE_BYTES or fields is None:
        return decoded(body, kind)
    large, parts, given, at = LargeBody(body), [], dict[str, Any](), 0
    for member in (await scanned(body)).members:
        name, begin = named_field(body, member)
        found = await _read_field(large, name, begin, member[1]) if name in fields else None
        if name is None or (name in fields and found is None):
            continue  # the parser of the rest reads it, or says what is wrong
        given |= {name: found} if name in fields else {}
        parts += [body[at:begin], b"null"]
        at = member[1]
    rest = b"".join([*parts, body[at:]])
    if len(rest) > MOST_REST_BYTES:
        raise RequestTooLargeError(f"more than {MOST_REST_BYTES} bytes of the body are no prompt")
    asked: Any = decoded(rest, kind)
    for name in list(given):  # of two with one name the last one counts: here it is a short one
        short = getattr(asked, name)
        if is_given(short) if isinstance(short, Raw) else short is not None:
            del given[name]
    return replace(asked, **given) if given else asked  # type: ignore[no-any-return]


def decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not what this call takes: {error}") from None


async def _read_field(large: LargeBody, name: str | None, start: int, end: int) -> object:
    """A large field's value; None: it is none of those that are read in slices."""
    body, first = large.body, large.body[start : start + 1]
    try:
        if name == "text" and first == b'"':
            return await large.text(Hole(start, _last(body, b'"', start, end) + 1, b""))
        if name == "token_ids" and first == b"[":
            last = _last(body, b"]", start, end)
            return _bounded(await large.ids(Hole(start + 1, last, b"")), MOST_TOKENS)
        if name in _HASHES and first == b"[":
            return await _read_hashes(large, name, start + 1, _last(body, b"]", start, end))
    except RequestTooLargeError as error:
        raise RequestTooLargeError(f"{name}: {error}", param=name) from None
    except (BadRequestError, ValueError) as error:  # of msgspec, too
        raise BadRequestError(f"{name}: {error}", param=name) from None
    return Raw(body[start:end]) if name in _RAW else None


def _last(body: bytes, sign: bytes, start: int, end: int) -> int:
    """Where a text or list ends that a member ends with. Raises BadRequestError."""
    at = body.rfind(sign, start + 1, end)
    before = body[max(start, body.rfind(b",", start, at)) : at]
    if at < 0 or body[at + 1 : end].strip(_BLANKS) or (sign == b"]" and before.strip(_BLANKS) == b","):
        raise BadRequestError("this is no JSON")
    return at


async def _read_hashes(large: LargeBody, name: str, start: int, end: int) -> array[int]:
    found, blocks = array("Q"), set[int]()
    for at, stop in large.slices(start, end):
        found += (part := read_hashes(large.body, at, stop))
        _bounded(found, MOST_HASHES)
        if name != "block_hashes":  # equal blocks may follow each other
            blocks.update(part)
            check_distinct(name, found, blocks)
        await asyncio.sleep(0)
    return found


def _bounded(found: Numbers, most: int) -> Numbers:
    if len(found) > most:
        raise RequestTooLargeError(f"{len(found)} of them are more than {most}, the most of one prompt")
    return found
