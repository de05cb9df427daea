"""What the admin listener asks of a request before it is routed: host, site, content type, peer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvrouter.frontend.operators.rights import is_loopback
from tests.frontend.clients import Client, Response, connected
from tests.frontend.fleet import FleetOf

# {port} is that of the listener, {other} another one.
HOSTS = {
    "127.0.0.1:{port}": 200,
    "127.0.0.1": 200,
    "127.0.0.1:{other}": 200,  # kubectl port-forward has a port of its own
    "127.0.0.1.:{port}": 200,
    "127.9.9.9": 200,
    "localhost:{other}": 200,
    "LocalHost.": 200,
    "[::1]:8001": 200,
    "[0:0:0:0:0:0:0:1]": 200,
    "[::ffff:127.0.0.1]:{port}": 200,
    "replica.example:{port}": 200,  # --advertise
    "Allowed.Example.": 200,
    "[2001:db8::7]": 200,
    "evil.example:{port}": 403,
    "localhost.evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "evil.localhost": 403,
    "10.0.0.7": 403,
    "[2001:db8::8]": 403,
    "2130706433": 403,
    "0x7f.1": 403,
    "0.0.0.0:{port}": 403,
    "localhost,evil.example": 403,
    "": 403,
    ":{port}": 403,
    ".": 403,
    # a known address or name with something before, behind or around it
    "127.0.0.1%2f": 403,
    "127.0.0.1%2f.evil.example": 403,
    "127.0.0.1%25lo": 403,
    "localhost%00": 403,
    "[127.0.0.1]": 403,
    "[::1.]": 403,
    "127.0.0.1..": 403,
    ".localhost": 403,
    "-.127.0.0.1": 403,
    "127.0.0.01": 403,
    "127.1": 403,
    "127.0.0.1:65536": 403,
    "localhost;x": 403,
    "localhost:{port}:{port}": 400,
    "evil@localhost": 400,
    "[::1%25lo]": 400,
}
SITES = {
    "origin: http://127.0.0.1:{port}": 200,
    "origin: HTTP://127.0.0.1:{port}": 200,
    "sec-fetch-site: same-origin": 200,
    "sec-fetch-site: none": 200,
    "origin: http://127.0.0.1:{other}": 403,
    "origin: http://127.0.0.1": 403,
    "origin: http://localhost:{port}": 403,
    "origin: http://evil.example": 403,
    "origin: null": 403,
    "origin:": 403,
    "origin: 127.0.0.1:{port}": 403,
    "origin: chrome-extension://127.0.0.1:{port}": 403,
    "origin: http://127.0.0.1:{port}x": 403,
    "origin: http://evil.example, http://127.0.0.1:{port}": 403,
    "origin: http://127.0.0.1:{port}\r\norigin: http://evil.example": 403,
    "sec-fetch-site: cross-site": 403,
    "sec-fetch-site: same-site": 403,
    "sec-fetch-site: same-origin\r\nsec-fetch-site: cross-site": 403,
    # a proxy on this host: who asks it is not on loopback
    "x-forwarded-for: 10.0.0.7": 403,
    "forwarded: for=10.0.0.7": 403,
    "origin: http://127.0.0.1%2f:{port}": 403,
    "origin: http://[127.0.0.1]:{port}": 403,
    "origin: http://x@127.0.0.1:{port}": 403,
    "origin: http://127.0.0.1:{port}/": 403,
    "origin: http://127.0.0.1:{port}?": 403,
}
# What proxies add to a request: standards, servers, clouds.
PROXIES = """
    via forwarded x-forwarded x-forwarded-for x-forwarded-host x-forwarded-proto x-forwarded-port
    x-forwarded-server x-forwarded-prefix x-forwarded-client-cert forwarded-for x-real-ip x-client-ip
    client-ip true-client-ip cf-connecting-ip cf-connecting-ipv6 fastly-client-ip fly-client-ip
    x-cluster-client-ip x-proxyuser-ip x-remote-ip x-remote-addr remote-addr x-originating-ip
    x-original-host x-original-url x-original-forwarded-for x-envoy-external-address x-envoy-original-path
    x-azure-clientip x-azure-socketip x-appengine-user-ip x-amzn-trace-id x-arr-ssl cdn-loop
    proxy-client-ip wl-proxy-client-ip x-source-ip x-proxied-by
"""
# What clients send themselves.
CLIENTS_OWN = """
    user-agent accept accept-encoding x-request-id x-stainless-lang x-session-id openai-organization
    traceparent x-kvrouter-mode x-via-app x-api-key anthropic-version x-client-name cache-control
"""
NAMES = ("--advertise", "replica.example", "--admin-allowed-host", "allowed.example")
FLAGS = (*NAMES, "--admin-allowed-host", "2001:db8::7")


async def _sent(client: Client, text: str, body: bytes = b"") -> Response:
    client.writer.write(text.encode("latin-1") + body)
    return await client.response()


async def test_hosts(fleet_of: FleetOf) -> None:
    """Only its own names are answered, on any port: DNS rebinding brings a foreign one."""
    async with fleet_of(*FLAGS) as fleet:
        port = fleet.frontend.admin_url.rpartition(":")[2]
        found = {}
        for host in HOSTS:
            named = host.format(port=port, other=1)
            async with connected(fleet.frontend.admin_url) as client:
                answer = await _sent(client, f"GET /workers HTTP/1.1\r\nhost: {named}\r\n\r\n")
            found[host] = answer.status
            if answer.status == 403:
                assert "--admin-allowed-host" in answer.json["error"]["message"]

        assert found == HOSTS


async def test_hosts_elsewhere(fleet_of: FleetOf) -> None:
    """None or two of them, and an absolute target; probes may use any name."""
    start = "HTTP/1.1\r\nhost: localhost\r\n"
    cases = {
        "GET /workers HTTP/1.1\r\n\r\n": 400,
        "GET /workers HTTP/1.0\r\n\r\n": 403,
        f"GET /workers {start}host: evil.example\r\n\r\n": 400,
        f"GET http://localhost/workers {start}\r\n": 200,
        f"GET http://evil.example/workers {start}\r\n": 403,
        f"GET http://evil.example@localhost/workers {start}\r\n": 403,
        "GET /live HTTP/1.0\r\n\r\n": 200,
        "GET /ready HTTP/1.1\r\nhost: 10.0.0.7:8100\r\n\r\n": 200,
        "HEAD /ready HTTP/1.1\r\nhost: evil.example\r\nx-forwarded-for: 1.2.3.4\r\n\r\n": 200,
        "GET /metrics?name[]=x HTTP/1.1\r\nhost: kvrouter.svc\r\n\r\n": 200,
        "POST /live HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0\r\n\r\n": 403,
        "GET /live/ HTTP/1.1\r\nhost: evil.example\r\n\r\n": 403,
    }
    async with fleet_of() as fleet:
        found = {}
        for text in cases:
            async with connected(fleet.frontend.admin_url) as client:
                client.writer.write(text.encode())
                status = int((await client.read_until(b"\r\n\r\n"))[9:12])
            found[text] = 200 if status == 503 else status  # /ready, while it starts

        assert found == cases


async def test_sites(fleet_of: FleetOf) -> None:
    """A page of another site may neither read nor change, nor one at another port of the same host."""
    async with fleet_of() as fleet:
        port = fleet.frontend.admin_url.rpartition(":")[2]
        for method, path in (("GET", "/workers"), ("POST", "/config/reload"), ("POST", "/v1/completions")):
            found = {}
            for lines in SITES:
                sent = lines.format(port=port, other=1)
                async with connected(fleet.frontend.admin_url) as client:
                    answer = await _sent(
                        client,
                        f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{sent}\r\n"
                        "content-type: application/json\r\ncontent-length: 2\r\n\r\n",
                        b"{}",
                    )
                found[lines] = 200 if answer.status == 400 else answer.status  # no prompt
            assert found == SITES, path


async def test_proxies(fleet_of: FleetOf, tmp_path: Path) -> None:
    """What came through a proxy on this host needs the key: the peer on loopback is the proxy."""
    key = tmp_path / "key"
    key.write_text("s3cret")
    async with (
        fleet_of("--admin-key-file", str(key)) as fleet,
        connected(fleet.frontend.admin_url) as client,
    ):

        async def status(*lines: str) -> int:
            client.send(b"", *lines, path="/workers", method="GET")
            return (await client.response()).status

        client.host = "localhost"
        for name in (PROXIES + PROXIES.title()).split():
            assert 401 == await status(f"{name}: 1.1"), name
            assert 200 == await status(f"{name}: ", "authorization: Bearer s3cret"), name
        assert 200 == await status(*(f"{name}: 1.1" for name in CLIENTS_OWN.split()))


async def test_links_to_the_page(fleet_of: FleetOf) -> None:
    """Another site may link to the page, and neither frame it nor load it."""
    opens = ("sec-fetch-site: cross-site", "sec-fetch-mode: navigate", "sec-fetch-dest: document")
    async with fleet_of() as fleet, connected(fleet.frontend.admin_url) as client:
        for path, lines, status in (
            ("/", opens, 200),
            ("/", (*opens[:2], "sec-fetch-dest: iframe"), 403),
            ("/", opens[:1], 403),
            ("/fleet", opens, 403),
            ("/dashboard/page.js", opens[:1], 403),
        ):
            client.send(b"", *lines, path=path, method="GET")
            assert status == (await client.response()).status, (path, lines)


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("/busy_threshold", "application/json; charset=utf-8", 400),
        ("/busy_threshold", "application/merge-patch+json", 400),
        ("/busy_threshold", "text/plain", 415),
        ("/busy_threshold", "TEXT/PLAIN;charset=UTF-8", 415),
        ("/busy_threshold", "application/x-www-form-urlencoded", 415),
        ("/busy_threshold", "multipart/form-data; boundary=x", 415),
        ("/busy_threshold", "application/octet-stream", 415),
        ("/busy_threshold", "", 415),
        ("/busy_threshold", None, 415),
        ("/routing", "text/plain", 415),
        ("/v1/route", "text/plain", 415),
        ("/nowhere", "text/plain", 404),
        ("/v1/completions", "text/plain", 415),
        ("/v1/completions", "multipart/form-data; boundary=x", 415),
        ("/v1/completions", None, 415),
        ("/v1/completions", "", 415),
        ("/v1/completions", "x", 415),
        ("/v1/audio/transcriptions", None, 415),
        ("/v1/audio/transcriptions", "application/x-www-form-urlencoded", 415),
        ("/v1/audio/transcriptions", "multipart/form-data; boundary=x", 404),
    ],
)
async def test_content_types(fleet_of: FleetOf, path: str, kind: str | None, status: int) -> None:
    """What pages can send without asking is not taken, but for forms of routes whose engines take forms."""
    body = json.dumps({"model": "nobody's", "prompt": "x"}).encode()
    if path.startswith("/v1/audio"):
        body = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nnobody\r\n--x--\r\n'
    async with fleet_of() as fleet, connected(fleet.frontend.admin_url) as client:
        client.send(body, *([f"content-type: {kind}"] if kind is not None else []), path=path)
        answer = await client.response()

        assert status == answer.status
        if status == 415:
            assert "application/json" in answer.json["error"]["message"]


async def test_without_a_body(fleet_of: FleetOf) -> None:
    """`curl -X POST` sends neither body nor type; a type without a body is checked."""
    async with fleet_of() as fleet, connected(fleet.frontend.admin_url) as client:
        for lines, status in (((), 200), (("content-type: text/plain",), 415)):
            client.send(b"", *lines, path="/config/reload")
            assert status == (await client.response()).status


async def _from_elsewhere(url: str, *headers: str, path: str = "/workers") -> Response:
    """The answer to a peer at 127.0.0.2."""
    host, _, port = url.partition("//")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
    try:
        client = Client(reader, writer, f"{host}:{port}")
        client.send(b"", *headers, path=path, method="GET")
        return await client.response()
    finally:
        writer.transport.abort()


@pytest.mark.usefixtures("remote_peers")
async def test_key_of_other_peers(fleet_of: FleetOf, tmp_path: Path) -> None:
    """Other peers need the key, in any case of the scheme; a changed file counts after a reload."""
    file = tmp_path / "key"
    file.write_text("first\n")
    async with fleet_of("--admin-key-file", str(file)) as fleet:
        url = fleet.frontend.admin_url

        async def status(*headers: str) -> int:
            return (await _from_elsewhere(url, *headers)).status

        refused = await _from_elsewhere(url)
        assert (401, 'Bearer realm="kvrouter"') == (refused.status, refused.header("www-authenticate"))
        assert "--admin-key-file" in refused.json["error"]["message"]
        assert [200, 401, 401, 401] == [
            await status(f"authorization: {given}")
            for given in ("bearer first", "Bearer firs", "first", "Bearer ")
        ]
        assert 403 == await status("authorization: Bearer first", "origin: http://evil.example")
        file.write_text("second")
        async with connected(url) as client:  # a peer on loopback needs none, and a wrong one does no harm
            assert 200 == (await client.ask(b"", "authorization: Bearer x", path="/config/reload")).status
        assert [401, 200] == [await status(f"authorization: Bearer {key}") for key in ("first", "second")]


@pytest.mark.usefixtures("remote_peers")
async def test_other_peers_without_a_key(fleet_of: FleetOf) -> None:
    """They are refused with what to set, but for probes and the page's files; the start has said so."""
    async with fleet_of("--admin-host", "0.0.0.0") as fleet:
        url = fleet.frontend.admin_url.replace("0.0.0.0", "127.0.0.1")
        refused = await _from_elsewhere(url, "authorization: Bearer x")
        assert 403 == refused.status
        assert "--admin-key-file FILE" in refused.json["error"]["message"]
        paths = ("/live", "/metrics", "/", "/dashboard/page.js")
        assert [200] * 4 == [(await _from_elsewhere(url, path=path)).status for path in paths]
        (warned,) = fleet.logged("frontend.admin_without_key")
        assert "--admin-key-file" in warned["remedy"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::1%lo", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    """Of a peer, whose address is never a name."""
    assert expected == is_loopback(host)
