"""vLLM's `kv_cache_report_mode` in request bodies: taken out of clients' requests, added to repair a rank."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvrouter.errors import BadRequestError

_XARGS = b"vllm_xargs"
_REPORT_MODE = b"kv_cache_report_mode"
_ASKS_REPORT = b'"%s":{"%s":"full"}' % (_XARGS, _REPORT_MODE)
_ESCAPED_NAME = re.compile(rb"\\u00[567]")
"""JSON lets a client write the letters of a name as escapes; nobody does without intent."""


def without_report_mode(body: bytes) -> bytes:
    """The body without vLLM's `kv_cache_report_mode`.

    With it vLLM announces blocks that it already had as if they were stored once more, and the
    agent's reference counts would grow for ever
    (docs/concepts/design.md#agent-state). Raises BadRequestError if the body
    asks for it and cannot be written anew.
    """
    if _REPORT_MODE not in body and not (b"\\u00" in body and _ESCAPED_NAME.search(body)):
        return body
    try:
        request: Any = msgspec.json.decode(body)
        arguments = request.get("vllm_xargs") if isinstance(request, dict) else None
        if not isinstance(arguments, dict) or _REPORT_MODE.decode() not in arguments:
            return body
        del arguments[_REPORT_MODE.decode()]
        return msgspec.json.encode(request)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}", param="vllm_xargs") from error


def with_report_mode(body: bytes) -> bytes:
    """The body with vLLM's `kv_cache_report_mode` "full" among its `vllm_xargs`.

    For a partial rank whose card says `repairs_by_report`
    (docs/concepts/design.md#agent-state). A body that has no object
    for it stays as it is: the worker shall judge it. One that does not name `vllm_xargs` gets it
    in front, without being parsed.
    """
    inside = body.lstrip()
    if not inside.startswith(b"{"):
        return body
    if _XARGS not in body and not (b"\\u00" in body and _ESCAPED_NAME.search(body)):
        rest = inside[1:].lstrip()
        return b"".join((b"{", _ASKS_REPORT, b"" if rest.startswith(b"}") else b",", rest))
    try:
        request: dict[str, Any] = msgspec.json.decode(body)
        arguments = request.get("vllm_xargs")
        if arguments is not None and not isinstance(arguments, dict):
            return body
        request["vllm_xargs"] = {**(arguments or {}), _REPORT_MODE.decode(): "full"}
        return msgspec.json.encode(request)
    except (ValueError, RecursionError):
        return body
