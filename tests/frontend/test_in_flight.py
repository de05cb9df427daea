"""Which requests are refused when the draining is over, and what becomes of the others."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvrouter.errors import ShuttingDownError
from kvrouter.frontend.in_flight import InFlight
from kvrouter.relay.exchange import ClientSide
from kvrouter.relay.request import Request, RequestHead


async def turn() -> None:
    """Let every task run until it waits."""
    for _ in range(3):
        await asyncio.sleep(0)


def new_request() -> Request:
    """One whose client is never spoken to."""
    return Request(RequestHead("POST", "/", [], wants_keep_alive=True), cast(ClientSide, None), b"")


async def serve(
    in_flight: InFlight, go_on: asyncio.Event, request: Request | None = None, *, is_answered: bool = False
) -> str:
    """A request that lasts until `go_on`."""
    request = request or new_request()
    try:
        in_flight.begin(request)
        if is_answered:
            in_flight.answered(request)
        await go_on.wait()
    except asyncio.CancelledError:
        refusal = in_flight.take_refusal(request)
        if refusal is None:
            raise
        raise refusal from None
    finally:
        in_flight.end(request)
    return "whole"


async def test_idle() -> None:
    """It is idle before the first request and after the last."""
    in_flight, go_on = InFlight(), asyncio.Event()
    seen = [in_flight.idle.is_set()]
    tasks = [asyncio.create_task(serve(in_flight, go_on)) for _ in range(2)]
    await turn()
    seen.append(in_flight.idle.is_set())
    go_on.set()
    await asyncio.gather(*tasks)

    assert [True, False, True] == [*seen, in_flight.idle.is_set()]


async def test_refuse_waiting() -> None:
    """Those without an answer are refused; those being answered, or answered, go on."""
    in_flight, go_on = InFlight(), asyncio.Event()
    begun = new_request()
    waiting = asyncio.create_task(serve(in_flight, go_on))
    answering = asyncio.create_task(serve(in_flight, go_on, begun))
    answered = asyncio.create_task(serve(in_flight, go_on, is_answered=True))
    await turn()
    in_flight.refuse_waiting({begun})

    with pytest.raises(ShuttingDownError, match="shutting down"):
        await waiting
    assert not in_flight.idle.is_set()
    go_on.set()
    assert ["whole", "whole"] == [await answering, await answered]
    assert in_flight.idle.is_set()
    assert not waiting.cancelling()


async def test_later_requests_are_refused() -> None:
    """One that comes when the others have been refused is refused, too."""
    in_flight = InFlight()
    in_flight.refuse_waiting(())

    with pytest.raises(ShuttingDownError):
        await serve(in_flight, asyncio.Event())
    assert in_flight.idle.is_set()


async def test_client_that_leaves() -> None:
    """A request whose client has left is cancelled, not refused."""
    in_flight = InFlight()
    task = asyncio.create_task(serve(in_flight, asyncio.Event()))
    await turn()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert in_flight.idle.is_set()
