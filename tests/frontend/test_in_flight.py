"""Which requests are rejected at the end of the drain, and what happens to the others."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from kvrouter.errors import ShuttingDownError
from kvrouter.frontend.requests.exchanges import InFlight
from kvrouter.relay.exchange import ClientSide
from kvrouter.relay.request import Request, RequestHead


async def turn() -> None:
    """Let every task run until it waits."""
    for _ in range(3):
        await asyncio.sleep(0)


def new_request() -> Request:
    """A request whose client is not used."""
    return Request(RequestHead("POST", "/", [], wants_keep_alive=True), Mock(spec=ClientSide), b"")


async def serve(in_flight: InFlight, may_end: asyncio.Event, request: Request | None = None) -> str:
    """A request that lasts until `may_end`."""
    request = request or new_request()
    try:
        in_flight.begin(request)
        await may_end.wait()
    except asyncio.CancelledError:
        rejection = in_flight.take_rejection(request)
        if rejection is None:
            raise
        raise rejection from None
    finally:
        in_flight.end(request)
    return "whole"


async def test_idle() -> None:
    """`idle` is set before the first request and after the last."""
    in_flight, may_end = InFlight(), asyncio.Event()
    seen = [in_flight.idle.is_set()]
    tasks = [asyncio.create_task(serve(in_flight, may_end)) for _ in range(2)]
    await turn()
    seen.append(in_flight.idle.is_set())
    may_end.set()
    await asyncio.gather(*tasks)

    assert [True, False, True] == [*seen, in_flight.idle.is_set()]


async def test_refuse_waiting() -> None:
    """Requests without an answer are rejected; the ones being answered continue."""
    in_flight, may_end = InFlight(), asyncio.Event()
    begun = new_request()
    waiting = asyncio.create_task(serve(in_flight, may_end))
    answering = asyncio.create_task(serve(in_flight, may_end, begun))
    await turn()
    in_flight.reject_waiting({begun.client})

    with pytest.raises(ShuttingDownError, match="shutting down"):
        await waiting
    assert not in_flight.idle.is_set()
    may_end.set()
    assert await answering == "whole"
    assert in_flight.idle.is_set()
    assert not waiting.cancelling()


async def test_later_requests_are_rejected() -> None:
    """A request that arrives after that is rejected as well."""
    in_flight = InFlight()
    in_flight.reject_waiting(())

    with pytest.raises(ShuttingDownError):
        await serve(in_flight, asyncio.Event())
    assert in_flight.idle.is_set()


async def test_client_that_leaves() -> None:
    """A request whose client has left is cancelled, not rejected."""
    in_flight = InFlight()
    task = asyncio.create_task(serve(in_flight, asyncio.Event()))
    await turn()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert in_flight.idle.is_set()
