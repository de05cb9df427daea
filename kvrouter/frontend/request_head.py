"""The head of the request to a worker: the client's own headers, less those that are not for it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from kvrouter.core.router import Placement
from kvrouter.frontend.framing import HOP_BY_HOP

_REPORT_MODE = b"kv_cache_report_mode"
_NOT_PASSED_ON = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-encoding",  # aiohttp has decoded the body
    b"accept-encoding",  # what is relayed is looked at, so it must come as it is
    b"expect",
    b"x-request-id",
    b"x-data-parallel-rank",
}


def request_head(http: web.Request, request_id: str, placement: Placement, body_bytes: int) -> bytes:
    """The request line and headers, closing empty line included."""
    lines = [
        f"{http.method} {http.raw_path} HTTP/1.1".encode(),
        b"host: " + urlsplit(placement.url).netloc.encode(),
        b"content-length: %d" % body_bytes,
        b"x-request-id: " + request_id.encode(),
    ]
    if placement.rank_header:
        lines.append(f"{placement.rank_header}: {placement.target.rank}".encode())
    for name, value in http.raw_headers:
        lower = name.lower()
        if lower not in _NOT_PASSED_ON and not lower.startswith(b"x-kvrouter-"):
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def without_report_mode(body: bytes) -> bytes:
    """The body without vLLM's `kv_cache_report_mode`.

    With it vLLM announces blocks that it already had as if they were stored once more, and the
    agent's reference counts would grow for ever (design §5).
    """
    if _REPORT_MODE not in body:
        return body
    request: dict[str, Any] = msgspec.json.decode(body)
    arguments = request.get("vllm_xargs")
    if isinstance(arguments, dict):
        arguments.pop(_REPORT_MODE.decode(), None)
    return msgspec.json.encode(request)
