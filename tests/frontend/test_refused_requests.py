"""What reaches no route: invalid HTTP, unknown encodings, bodies that are too large."""

from __future__ import annotations

import json

import pytest

from tests.frontend.fleet import BODY, FleetOf


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /live HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: x\r\n\r\n",
    ],
)
async def test_broken_http(fleet_of: FleetOf, request_bytes: bytes) -> None:
    """Invalid HTTP is answered with 400 in OpenAI's form, and the connection ends."""
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write(request_bytes)
        response = await client.response()

        assert (400, "BadRequestError") == (response.status, response.json["error"]["type"])
        assert response.json["error"]["message"].startswith("the request cannot be read: ")
        assert "application/json" == response.header("content-type")
        assert response.header("x-request-id")
        assert await client.is_closed()


@pytest.mark.parametrize("path", ["POST /v1/completions", "GET /live", "GET /nowhere"])
@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", [], 400),
        ("1.1", ["a", "a"], 400),
        ("1.0", ["a", "b"], 400),
        ("1.1", ["a b"], 400),
        ("1.1", ["[::1"], 400),
        ("2.0", ["a"], 505),
        ("0.9", ["a"], 505),
    ],
)
async def test_host_and_version(
    fleet_of: FleetOf, path: str, version: str, hosts: list[str], status: int
) -> None:
    """A request without one valid host, or of another major version, is rejected on any route."""
    body = json.dumps(BODY)
    lines = [f"{path} HTTP/{version}", *(f"host: {host}" for host in hosts), f"content-length: {len(body)}"]
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write("\r\n".join([*lines, "", body]).encode())
        response = await client.response()

        assert status == response.status == response.json["error"]["code"]
        assert response.head.startswith(b"HTTP/1.")
        assert await client.is_closed()
        assert not fleet.requests


@pytest.mark.parametrize("host", ["", "a_b.c:80", "[::1]:8000", "127.0.0.1", "xn--bcher-kva.example."])
async def test_valid_hosts(fleet_of: FleetOf, host: str) -> None:
    """Every form of host in RFC 3986 is accepted, an empty one included."""
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write(f"GET /live HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())

        assert 200 == (await client.response()).status


@pytest.mark.parametrize("encoding", ["br", "zstd"])
async def test_unknown_encoding(fleet_of: FleetOf, encoding: str) -> None:
    """A body with an unknown encoding is a 400 in OpenAI's form."""
    async with fleet_of() as fleet:
        response = await fleet.ask(b"\x28\xb5\x2f\xfd" * 9, f"content-encoding: {encoding}")

        assert (400, "BadRequestError") == (response.status, response.json["error"]["type"])
        assert not fleet.requests


async def test_stalled_body(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops amid its body gets 408."""
    monkeypatch.setattr("kvrouter.frontend.server.http_server.KEEP_ALIVE_S", 0.05)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n"
    async with fleet_of() as fleet, fleet.connected() as chunked, fleet.connected() as invited:
        chunked.writer.write(head + b"transfer-encoding: chunked\r\n\r\n5\r\nab")
        invited.writer.write(head + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n")
        await invited.reader.readuntil(b"\r\n\r\n")
        invited.writer.write(b"{")
        responses = [await client.response() for client in (chunked, invited)]

        assert [408, 408] == [response.status for response in responses]
        assert ["close"] * 2 == [response.header("connection") for response in responses]
        assert "no more of the request body" in responses[0].json["error"]["message"]
        assert not fleet.requests


async def test_too_large_is_not_read(fleet_of: FleetOf) -> None:
    """A body whose length is above the limit is rejected at once."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n"
    async with fleet_of("--max-body-mib", "1") as fleet, fleet.connected() as client:
        client.writer.write(head + b"content-length: %d\r\n\r\n" % 5_000_000_000)
        response = await client.response()

        assert (413, 413) == (response.status, response.json["error"]["code"])
        assert "close" == response.header("connection")


async def test_too_large_before_it_is_sent(fleet_of: FleetOf) -> None:
    """With `Expect: 100-continue` a body above the limit is rejected before it is sent."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\nx-request-id: mine\r\n"
    async with fleet_of("--max-body-mib", "1") as fleet, fleet.connected() as client:
        client.writer.write(head + b"content-length: %d\r\n\r\n" % (1024 * 1024 + 1))
        response = await client.response()

        assert (413, 413) == (response.status, response.json["error"]["code"])
        assert "1048576 bytes are allowed" in response.json["error"]["message"]
        assert ("mine", "close") == (response.header("x-request-id"), response.header("connection"))


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_other_expectations(fleet_of: FleetOf, version: bytes) -> None:
    """`Expect` is ignored in HTTP/1.0. In HTTP/1.1 an unknown expectation is a 417."""
    body = json.dumps(BODY).encode()
    expected = b"100-continue" if version == b"HTTP/1.0" else b"wonders"
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write(b"POST /v1/completions " + version + b"\r\nhost: t\r\nexpect: " + expected)
        client.writer.write(b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

        assert (200 if version == b"HTTP/1.0" else 417) == (await client.response()).status
