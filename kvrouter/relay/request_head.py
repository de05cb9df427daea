"""The head of the request to a worker: the client's own headers, less those that are not for it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from kvrouter.core.fleet.router import Placement
from kvrouter.errors import BadRequestError
from kvrouter.relay.framing import hop_by_hop
from kvrouter.relay.request import Head, Request

_XARGS = b"vllm_xargs"
_REPORT_MODE = b"kv_cache_report_mode"
_ASKS_REPORT = b'"%s":{"%s":"full"}' % (_XARGS, _REPORT_MODE)
_ESCAPED_NAME = re.compile(rb"\\u00[567]")
"""JSON lets a client write the letters of a name as escapes; nobody does without intent."""
_NOT_FOR_WORKERS = frozenset(
    {
        "host",
        "content-length",
        "content-encoding",  # the body has been decoded
        "accept-encoding",  # what is relayed is looked at, so it must come as it is
        "expect",
        "x-request-id",
    }
)
_MOST_WAYS = 8
"""Ways to name a rank, of one head, that are kept."""
_RANK = "x-data-parallel-rank"
"""A client that names its target itself may also name a rank that only the engine knows of."""


def request_head(
    request: Request, request_id: str, placement: Placement, body_bytes: int, *, keeps_rank: bool = False
) -> bytes:
    """The request line and headers, closing empty line included.

    `keeps_rank`: the client's own rank goes to a worker whose card tells no other way to name one.
    """
    head, rank_header = request.head, placement.rank_header
    passed_on = head.passed_on.get((rank_header, keeps_rank))
    if passed_on is None:
        passed_on = _passed_on(head, rank_header, keeps_rank)
        if len(head.passed_on) < _MOST_WAYS:
            head.passed_on[rank_header, keeps_rank] = passed_on
    rank = f"{rank_header}: {placement.target.rank}\r\n" if rank_header else ""
    own = (
        f"{head.method} {head.path} HTTP/1.1\r\nhost: {_host(placement.url)}\r\n"
        f"content-length: {body_bytes}\r\nx-request-id: {request_id}\r\n{rank}"
    )
    return own.encode("utf-8", "surrogateescape") + passed_on


def _passed_on(head: Head, rank_header: str, keeps_rank: bool) -> bytes:
    """The lines that are the same for every worker with this way to name a rank."""
    left_out = _left_out(head, rank_header, keeps_rank)
    lines = [
        f"{name}: {value}\r\n"
        for name, value in head.fields
        if name not in left_out and not name.startswith("x-kvrouter-")
    ]
    return "".join([*lines, "\r\n"]).encode("utf-8", "surrogateescape")


@lru_cache(maxsize=4096)
def _host(url: str) -> str:
    """Host and port, as they stand there: whether they make sense shows when we connect."""
    return url.partition("//")[2].partition("/")[0].rpartition("@")[2]


def _left_out(head: Head, rank_header: str, keeps_rank: bool) -> frozenset[str]:
    """The headers that are not for the worker, in lower case; `connection` may name some."""
    connection = ",".join(value for name, value in head.fields if name == "connection")
    named = hop_by_hop(connection.encode("utf-8", "surrogateescape"))
    left_out = _NOT_FOR_WORKERS.union((name.decode("latin-1") for name in named), (rank_header.lower(),))
    return left_out if keeps_rank and not rank_header else left_out | {_RANK}


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
