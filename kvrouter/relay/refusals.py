"""What in a worker's answer says that it will not serve the request."""

from __future__ import annotations

import msgspec

_RETRIABLE = frozenset({408, 429})
UNKNOWN_MODEL = 404


def is_refusal(status: int, *, serves_model: bool = False) -> bool:
    """Whether another worker may do better; every other 4xx is the client's own fault.

    `serves_model`: the worker has announced the model, so a 404 is its own fault. It serves another one now.
    """
    return status >= 500 or status in _RETRIABLE or (serves_model and status == UNKNOWN_MODEL)


def first_line(text: bytes) -> tuple[bytes, bool]:
    """The first line of a stream that does not only name its event, and whether all of it is there."""
    line, newline, rest = text.lstrip().partition(b"\n")
    if newline and line.startswith(b"event:"):
        line, newline, _ = rest.partition(b"\n")
    return line, bool(newline)


def error_status_in(event: bytes) -> int:
    """The status inside an event `data: {"error": …}`; 0 if it is no error."""
    if b'"error"' not in event:
        return 0
    try:
        body = msgspec.json.decode(event.removeprefix(b"data:").strip())
    except (ValueError, RecursionError):
        return 0  # broken JSON, broken UTF-8, nested for ever
    error = body.get("error") if isinstance(body, dict) else None
    if not error:
        return 0
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500
