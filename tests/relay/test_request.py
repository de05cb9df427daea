"""What a worker gets of a client's request, and the client of the worker's answer."""

from __future__ import annotations

import json

import pytest

from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.workers import answer, says


async def test_headers_pass(fleet_of: FleetOf) -> None:
    """A client's headers, query and body reach the worker unchanged."""
    body = b' {"model" : "m", "prompt":[1,2], "x": 1e2}\n'
    async with fleet_of() as fleet:
        await fleet.ask(
            body, "Authorization: Bearer x", "X-One: 1", "X-One: 2", path="/v1/completions?a=b%20c"
        )
        (request,) = fleet.workers[0].requests

        assert request.head.startswith(b"POST /v1/completions?a=b%20c HTTP/1.1\r\n")
        assert body == request.body
        assert (["Bearer x"], ["1", "2"]) == (request.headers("authorization"), request.headers("x-one"))
        assert [fleet.workers[0].url.removeprefix("http://")] == request.headers("host")
        assert [str(len(body))] == request.headers("content-length")


async def test_hop_by_hop_to_the_worker(fleet_of: FleetOf) -> None:
    """Hop-by-hop headers do not reach the worker, nor the headers that `Connection` names."""
    headers = (
        "Connection: X-Private, keep-alive",
        "X-Private: 1",
        "Keep-Alive: 5",
        "TE: trailers",
        "Trailer: x",
    )
    async with fleet_of() as fleet:
        await fleet.ask(BODY, *headers, "Proxy-Authorization: y", "Accept-Encoding: gzip")
        (request,) = fleet.workers[0].requests

        for name in ("connection", "x-private", "keep-alive", "te", "trailer", "proxy-authorization"):
            assert [] == request.headers(name)
        assert [] == request.headers("accept-encoding")


async def test_hop_by_hop_to_the_client(fleet_of: FleetOf) -> None:
    """The worker's headers reach the client, except hop-by-hop ones and what the router sets."""
    headers = (
        b"Connection: x-private\r\nx-private: 1\r\nKeep-Alive: timeout=5\r\nServer: uvicorn\r\n"
        b"x-request-id: engine\r\nX-KvRouter-Worker: liar\r\nset-cookie: a\r\nset-cookie: b\r\n"
    )
    async with fleet_of(scripts=(says(answer(headers=headers)),)) as fleet:
        response = await fleet.ask(BODY, "x-request-id: mine")

        assert ["mine"] == response.headers("x-request-id")
        assert ["w0"] == response.headers("x-kvrouter-worker")
        assert ([], []) == (response.headers("x-private"), response.headers("keep-alive"))
        assert ["uvicorn"] == response.headers("server")
        assert ["a", "b"] == response.headers("set-cookie")


async def test_request_id(fleet_of: FleetOf) -> None:
    """A client's request id is forwarded and returned, on errors too; without one a new one is made."""
    async with fleet_of() as fleet:
        given = await fleet.ask(BODY, "X-Request-Id: abc-1")
        refused = await fleet.ask(b"{", "X-Request-Id: abc-2")
        made_up = await fleet.ask(BODY)
        ids = [request.headers("x-request-id") for request in fleet.workers[0].requests]

        assert ("abc-1", "abc-2") == (given.header("x-request-id"), refused.header("x-request-id"))
        assert [["abc-1"], [made_up.header("x-request-id")]] == ids
        assert 32 == len(made_up.header("x-request-id"))


@pytest.mark.parametrize("value", ["a b", "é", "x" * 129, "", "a\tb"])
async def test_unsafe_request_id(fleet_of: FleetOf, value: str) -> None:
    """An id that would not be safe in a log or a header is replaced."""
    async with fleet_of() as fleet:
        response = await fleet.ask(BODY, f"X-Request-Id: {value}")

        assert 32 == len(response.header("x-request-id"))


@pytest.mark.parametrize("value", [b"a\rX-Evil: 1", b"a\nX-Evil: 1", b"a\x00b", b"a\r X-Evil: 1"])
async def test_header_injection(fleet_of: FleetOf, value: bytes) -> None:
    """A header with a line break inside never becomes two headers, in the router or at the worker."""
    async with fleet_of() as fleet, fleet.connected() as client:
        body = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n"
        client.writer.write(head % (value, len(body)) + body)
        response = await client.response()

        assert [] == response.headers("x-evil")
        assert [[]] * len(fleet.requests) == [each.headers("x-evil") for each in fleet.workers[0].requests]


async def test_bytes_in_the_query(fleet_of: FleetOf) -> None:
    """A query that is not UTF-8 is forwarded unchanged."""
    async with fleet_of() as fleet, fleet.connected() as client:
        body = json.dumps(BODY).encode()
        client.writer.write(
            b"POST /v1/completions?x=\xff HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )

        assert (await client.response()).status in {200, 400}


async def test_rank(fleet_of: FleetOf) -> None:
    """The router chooses the rank: the client's is dropped, under any header name."""
    async with fleet_of(ranks=2, rank_header="X-Rank") as fleet:
        responses = [
            await fleet.ask(BODY, "x-rank: 7", "X-data-parallel-rank: 7", "x-kvrouter-overlap-weight: 1")
            for _ in range(2)
        ]
        requests = fleet.workers[0].requests

        assert {"0", "1"} == {response.header("x-kvrouter-dp-rank") for response in responses}
        assert [[each.header("x-kvrouter-dp-rank")] for each in responses] == [
            request.headers("x-rank") for request in requests
        ]
        for request in requests:
            assert ([], []) == (
                request.headers("x-data-parallel-rank"),
                request.headers("x-kvrouter-overlap-weight"),
            )
