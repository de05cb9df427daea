"""Bodies that arrive in pieces."""

from __future__ import annotations

import asyncio

import pytest

from kvrouter.errors import BadRequestError, BodiesFullError, KvRouterError, RequestTooLargeError
from kvrouter.relay.arriving import ArrivingBody
from kvrouter.relay.request import ArrivingBytes
from kvrouter.relay.request_parser import ChunkFraming, LengthFraming

MOST = 10_000


def arriving(framing: LengthFraming | ChunkFraming, shared: ArrivingBytes, most: int = MOST) -> ArrivingBody:
    return ArrivingBody(framing, asyncio.get_running_loop().create_future(), shared, most=most)


async def test_bytes_are_counted() -> None:
    """The bytes of an unfinished body count; the bytes of a complete or rejected body do not."""
    shared = ArrivingBytes(100)
    whole, left = arriving(LengthFraming(10), shared), arriving(ChunkFraming(), shared)
    whole.feed(b"12345")
    left.feed(b"3\r\nabc\r\n")
    counted = shared.count
    rest = whole.feed(b"67890next")
    left.drop()

    assert (8, 0, b"next") == (counted, shared.count, rest)
    assert b"1234567890" == await whole.whole()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"8\r\n12345678\r\n0\r\n\r\n", RequestTooLargeError),
        (b"4\r\n1234\r\n4\r\n5678\r\n0\r\n\r\n", RequestTooLargeError),
        (b"4\r\n1234\r\nx", BadRequestError),
        (b"1\r\n1\r\n0\r\nno colon\r\n\r\n", BadRequestError),
    ],
)
async def test_failed_body(sent: bytes, error: type[KvRouterError]) -> None:
    """After its failure all that arrives is dropped, and nothing stays counted."""
    shared = ArrivingBytes(100)
    body = arriving(ChunkFraming(), shared, most=7)
    rests = [body.feed(bytes([byte])) for byte in sent], body.feed(b"POST / HTTP/1.1\r\n\r\n")

    assert ([b""] * len(sent), b"") == rests
    assert not body.is_whole
    assert 0 == shared.count
    with pytest.raises(error) as raised:
        await body.whole()
    assert raised.value.is_body_left


async def test_all_bodies_together() -> None:
    """Beyond the common bound a body is rejected."""
    shared = ArrivingBytes(1)
    shared.take(shared.most - 2)
    body = arriving(LengthFraming(10), shared)
    body.feed(b"123")

    with pytest.raises(BodiesFullError):
        await body.whole()
    assert shared.most - 2 == shared.count


async def test_request_is_gone() -> None:
    """The rest of a body whose request has ended is skipped, and what follows it is not."""
    shared = ArrivingBytes(100)
    body = arriving(LengthFraming(4), shared)
    body.feed(b"12")
    body._done.cancel()

    assert b"next" == body.feed(b"34next")
    assert body.is_whole
    body.drop()
    assert 0 == shared.count
