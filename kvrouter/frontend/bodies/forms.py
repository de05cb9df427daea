"""The fields of a form (multipart/form-data), found without copying its files."""

from __future__ import annotations

import re
from collections.abc import Iterator

FORM = "multipart/form-data"
# Parts of a form in which fields are searched: bounds the work for a hostile body.
_MAX_PARTS = 64
_NAME = re.compile(rb';\s*name="?([^";\r\n]*)', re.IGNORECASE)
_BOUNDARY = re.compile(r';\s*boundary="?([^";]+)', re.IGNORECASE)


def form_fields(body: bytes, content_type: str) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of the value of each part. Malformed forms end early: the engine rejects them."""
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
            yield name[1], head_end + len(b"\r\n\r\n"), end
        start = end + len(b"\r\n")
