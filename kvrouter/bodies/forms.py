"""Forms (multipart/form-data), as the engines' parser reads them: their parts, with the names of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message

import msgspec
from msgspec import Struct

from kvrouter.bodies import lax
from kvrouter.errors import BadRequestError

FORM = "multipart/form-data"
# Starlette, the engines' server, takes 1,000 fields and 1,000 files.
MOST_PARTS = 2_000
# Python's email takes the square of a header's length (3.11: 0.5 ms for this much, 2 s for 64 KB).
MOST_HEAD_BYTES = 1024
# Of heads that need Python's email at all.
MOST_ODD_PARTS = 64
# vLLM reads this part as a JSON object.
_ARGUMENTS = "vllm_xargs"
_HEAD_END = b"\r\n\r\n"
_LINE_END = b"\r\n"
_DISPOSITION = "content-disposition"
# In nearly all heads: one line, one name in quotes, without escapes and RFC 2231's `name*`.
_PLAIN_HEAD = re.compile(
    rb'content-disposition:[^*\\\r\n;]*;\s*name="([^"*\\\r\n]*)"'
    rb'(?:;\s*filename="[^"*\\\r\n]*")?(?:\r\n(?!content-disp)[^\r\n]*)*',
    re.IGNORECASE,
)


class Part(Struct, frozen=True):
    names: frozenset[str]
    """Its name. Several if its head has several: which one counts is up to the engine."""
    start: int
    """Where its delimiter begins."""
    value_at: int
    end: int
    """Where its value ends and the next delimiter begins."""


def parts(body: bytes, content_type: str) -> Iterator[Part]:
    """The parts that are complete. Raises BadRequestError for more or longer ones than are allowed."""
    delimiter = _delimiter(content_type)
    start, odd_parts = body.find(delimiter) if delimiter else -1, 0
    for _ in range(MOST_PARTS):
        if start < 0:
            return
        end = body.find(_LINE_END + delimiter, start + 1)
        if end < 0:
            return
        head_end = body.find(_HEAD_END, start, end)
        if head_end >= 0:
            if head_end - start > MOST_HEAD_BYTES + len(delimiter):
                raise BadRequestError(f"a part of the form has more than {MOST_HEAD_BYTES} bytes of headers")
            head = body[body.find(_LINE_END, start + len(delimiter)) + 2 : head_end]
            plain = _PLAIN_HEAD.fullmatch(head)
            odd_parts += plain is None
            if odd_parts > MOST_ODD_PARTS:
                raise BadRequestError(
                    f'more than {MOST_ODD_PARTS} parts of the form have no name in "quotes"'
                )
            names = _odd_names(head) if plain is None else frozenset({plain[1].decode("utf-8", "replace")})
            yield Part(names, start, head_end + len(_HEAD_END), end)
        start = end
    raise BadRequestError(f"the form has more than {MOST_PARTS} parts")


def _delimiter(content_type: str) -> bytes:
    if len(content_type) > MOST_HEAD_BYTES:
        raise BadRequestError(f"the content-type of the form has more than {MOST_HEAD_BYTES} characters")
    line = f"content-type: {content_type}".encode("utf-8", "surrogateescape")
    # Which of two counts is up to the engine, and a charset is that of the names.
    if len(boundaries := _values(line, "boundary")) > 1 or _values(line, "charset"):
        raise BadRequestError("the content-type of the form has a charset, or more than one boundary")
    boundary = next(iter(boundaries), "")
    return b"--" + boundary.encode("utf-8", "surrogateescape") if boundary else b""


def _odd_names(head: bytes) -> frozenset[str]:
    lines = [line for line in head.split(_LINE_END) if line.lower().startswith(_DISPOSITION.encode())]
    return frozenset(name for line in lines for name in _values(line, "name"))


def _values(line: bytes, parameter: str) -> list[str]:
    """The values of a header's parameter, as Python's email reads them: so does python-multipart."""
    message = Message()
    message["x"] = line.partition(b":")[2].strip().decode("latin-1")
    found = message.get_params(failobj=[], header="x")
    return [_text(value) for name, value in found if name.lower() == parameter]


def _text(value: str | tuple[str | None, str | None, str]) -> str:
    """RFC 2231 gives a charset and a language, too."""
    return value if isinstance(value, str) else value[2]


def guarded_in(part: Part, body: bytes) -> set[str]:
    """The kinds of forbidden fields in a part. Raises BadRequestError for a long `vllm_xargs`."""
    kinds = {kind for name in part.names if (kind := lax.kind_of(name.partition("[")[0]))}
    if kinds or _ARGUMENTS not in part.names:
        return kinds
    raw = body[part.value_at : part.end]
    if len(raw) > lax.MOST_MENDED_BYTES:
        raise BadRequestError(
            f"more than {lax.MOST_MENDED_BYTES} bytes are not allowed here", param=_ARGUMENTS
        )
    return lax.guarded_in({_ARGUMENTS: msgspec.Raw(raw)})


def without_guarded(content_type: str, body: bytes) -> bytes:
    """The form without such parts, and without such fields in its `vllm_xargs`."""
    pieces, at = [], 0
    for part in parts(body, content_type):
        if not guarded_in(part, body):
            continue
        if any(lax.kind_of(name.partition("[")[0]) for name in part.names):
            # Between two delimiters, and the line end before the second is the first one's.
            pieces.append(body[at : part.start])
        else:
            raw = msgspec.Raw(body[part.value_at : part.end])
            kept = bytes(lax.without_guarded({_ARGUMENTS: raw})[_ARGUMENTS])
            pieces += [body[at : part.value_at], lax.with_nan(kept, bytes(raw))]
        at = part.end
    return b"".join([*pieces, body[at:]])
