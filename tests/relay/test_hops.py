"""The hop header: what is written, and what is refused."""

from __future__ import annotations

import pytest

from kvrouter.errors import LoopError
from kvrouter.relay.engine_answers import is_rejection
from kvrouter.relay.hops import MOST_HOPS, check_hops
from kvrouter.relay.request import RequestHead, parse_plain


def head(*hops: str) -> RequestHead:
    """Of a request that came with these hop headers."""
    lines = "".join(f"X-KvRouter-Hops: {one}\r\n" for one in hops)
    read = parse_plain(f"POST /v1/chat HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n{lines}\r\n".encode())
    assert read is not None
    return read[0]


def sent(read: RequestHead, router_id: str = "r1") -> list[bytes]:
    """The hop headers that a worker gets."""
    whole = read.for_worker(
        "http://w1:9000", "id", 2, rank=0, rank_header="", keeps_rank=False, router_id=router_id
    )
    return [line for line in whole.split(b"\r\n") if b"-hops" in line]


def test_each_router_adds_its_id() -> None:
    """A client's request gets this router's id, another router's request both."""
    assert [b"x-kvrouter-hops: r1"] == sent(head())
    assert [b"x-kvrouter-hops: r7, r8, r1"] == sent(head("r7", "r8"))
    assert [] == sent(head(), router_id="")


def test_written_once_for_each_head() -> None:
    """It is a part of the lines that requests with equal heads share."""
    read = head()
    sent(read)

    (shared,) = read._forwarded.values()

    assert b"x-kvrouter-hops: r1\r\n\r\n" == shared


@pytest.mark.parametrize("hops", ["me", "other, me", "other,me , more"])
def test_loop(hops: str) -> None:
    """A request that has passed this fleet is refused with 508, which names the replica."""
    with pytest.raises(LoopError, match=r"loop detected.*replica me "):
        check_hops(hops, "me".__eq__)


@pytest.mark.parametrize("hops", [",", "a b", "x" * 65, "ä", "r1,, r2", ", ".join("a" * (MOST_HOPS + 1))])
def test_what_no_router_writes(hops: str) -> None:
    """A client's invention is refused, and so never sent on."""
    with pytest.raises(LoopError, match="not a list of 1 to 8 router ids"):
        check_hops(hops, lambda _: False)


def test_other_fleets() -> None:
    """A request that has passed other routers only is served."""
    check_hops(", ".join("abcdefgh"), "me".__eq__)


def test_no_retry() -> None:
    """Every other 5xx may be tried elsewhere; a loop ends."""
    assert [508] == [status for status in range(500, 600) if not is_rejection(status)]
