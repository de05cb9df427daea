"""The head of the request to a worker: the client's own headers, less those that are not for it."""

from __future__ import annotations

from functools import lru_cache

from kvrouter.relay.framing import hop_by_hop
from kvrouter.relay.request import Head

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
    head: Head, url: str, request_id: str, body_bytes: int, *, rank: int, rank_header: str, keeps_rank: bool
) -> bytes:
    """The request line and headers, closing empty line included.

    `keeps_rank`: the client's own rank goes to a worker whose card tells no other way to name one.
    """
    passed_on = head.passed_on.get((rank_header, keeps_rank))
    if passed_on is None:
        passed_on = _passed_on(head, rank_header, keeps_rank)
        if len(head.passed_on) < _MOST_WAYS:
            head.passed_on[rank_header, keeps_rank] = passed_on
    rank_line = f"{rank_header}: {rank}\r\n" if rank_header else ""
    own = (
        f"{head.method} {head.path} HTTP/1.1\r\nhost: {_host(url)}\r\n"
        f"content-length: {body_bytes}\r\nx-request-id: {request_id}\r\n{rank_line}"
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
