"""A load that continues until it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scripts.kit.load import LoadRequest, SteadyLoad

REQUESTS = [LoadRequest(0.0, b"1"), LoadRequest(0.0, b"2")]


class Server:
    """Begins a stream for each request, and ends it when `may_end` is set."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def answer(self, http: web.Request) -> web.StreamResponse:
        """One event now, the end later."""
        self.bodies.append(await http.read())
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(b"data: {}\n\n")
        self.has_begun.set()
        await self.may_end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """One server."""
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    async with TestServer(app) as http:
        server.url = str(http.make_url("")).rstrip("/")
        yield server


async def test_until_stopped() -> None:
    """The load sends requests to the replicas in turn; stopping waits for the answers."""
    async with serving() as one, serving() as two:
        async with SteadyLoad(REQUESTS, [one.url, two.url], rate=1000.0) as load:
            one.may_end.set()
            two.may_end.set()
            while len(load.outcomes) < 5:
                await two.has_begun.wait()
                await asyncio.sleep(0)
        assert [one.url, two.url] * 2 == [outcome.url for outcome in load.outcomes[:4]]
        assert not [outcome.error for outcome in load.outcomes if outcome.error]
        assert [] == load.in_flight
        assert {b"1"} == set(one.bodies)
        assert {b"2"} == set(two.bodies)


async def test_is_streaming() -> None:
    """A replica is streaming while an answer has begun and not ended."""
    async with serving() as server, SteadyLoad(REQUESTS, [server.url], rate=1000.0) as load:
        assert not load.is_streaming(server.url)
        await server.has_begun.wait()
        while not load.is_streaming(server.url):  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0)
        assert load.in_flight[0].ttft_s is not None
        server.may_end.set()
        await load.stop()

        assert not load.is_streaming(server.url)
        assert all(outcome.sent_at_s <= (outcome.ended_at_s or 0.0) for outcome in load.outcomes)


async def test_refused_connections_go_elsewhere(free_port: Callable[[], int]) -> None:
    """A request whose connection is refused goes to another replica; without another one it fails."""
    gone = f"http://127.0.0.1:{free_port()}"
    async with serving() as server:
        server.may_end.set()
        async with SteadyLoad(REQUESTS, [gone, server.url], rate=1000.0) as load:
            await server.has_begun.wait()
        assert {server.url} == {outcome.url for outcome in load.outcomes}
        assert not [outcome.error for outcome in load.outcomes if outcome.error]
    async with SteadyLoad(REQUESTS, [gone], rate=1000.0) as load:
        while not load.outcomes:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0)
    assert "cannot connect" in (load.outcomes[0].error or "")


async def test_left_out() -> None:
    """A replica that is left out receives no requests, and later its turn again."""
    async with serving() as one, serving() as two:
        one.may_end.set()
        two.may_end.set()
        async with SteadyLoad(REQUESTS, [one.url, two.url], rate=1000.0) as load:
            load.left_out.add(two.url)
            while len(one.bodies) < 4:  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(0)
            assert not two.bodies
            load.left_out.discard(two.url)
            await two.has_begun.wait()


async def test_one_more() -> None:
    """A request sent by hand counts as one of the load, with its own number."""
    async with serving() as server, SteadyLoad(REQUESTS, [server.url], rate=1000.0) as load:
        server.may_end.set()
        await server.has_begun.wait()
        more = load.send(LoadRequest(0.0, b"more"), server.url)
        await load.stop()

    assert more in load.outcomes
    assert None is more.error
    assert len(load.outcomes) == len({outcome.number for outcome in load.outcomes})
    assert 1 == server.bodies.count(b"more")


async def test_error_ends_it() -> None:
    """If the script fails, the load does not wait for answers."""
    async with serving() as server:

        async def fail() -> None:
            async with SteadyLoad(REQUESTS, [server.url], rate=1000.0):
                await server.has_begun.wait()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        server.may_end.set()
