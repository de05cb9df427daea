"""Who may do what: every route of both listeners, for everyone who can send a request to it.

A route without a row fails, and so does a row without a route. docs/reference/http.md has the same table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from kvrouter.frontend.keys.keys_file import Key
from kvrouter.frontend.requests import engine_routes
from kvrouter.frontend.requests.owners import name_of, owned
from tests.frontend.clients import Client, Response, get
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.test_keys import Ring, ring
from tests.frontend.workers import OK

__all__ = ["ring"]

KEY = "s3cret"
DOCS = Path(__file__).parents[1] / "docs/reference/http.md"

# By kind, method and path as /openapi.json has them. HEAD is answered as GET.
HTTP: dict[str, set[tuple[str, str]]] = {
    "probes": {("GET", "/live"), ("GET", "/ready"), ("GET", "/metrics")},
    "the page": {("GET", "/"), ("GET", "/dashboard/{file}")},
    "models, health": {
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"),
        ("GET", "/health"),
        ("GET", "/openapi.json"),
    },
    "engines": {(method, path) for method, path, _ in engine_routes.relayed()},
    "operators, reading": {
        ("GET", "/workers"),
        ("GET", "/workers/{worker_id}/blocks"),
        ("GET", "/fleet"),
        ("GET", "/fleet/stream"),
        ("GET", "/prefixes"),
        ("GET", "/clients"),
        ("GET", "/tenants"),
        ("GET", "/decisions"),
        ("GET", "/decisions/{request_id}"),
        ("GET", "/busy_threshold"),
        ("GET", "/routing"),
        ("GET", "/deadly_prompts"),
        ("POST", "/v1/route"),
    },
    "operators, changing": {
        ("POST", "/busy_threshold"),
        ("POST", "/config/reload"),
        ("POST", "/routing"),
        ("DELETE", "/deadly_prompts"),
        ("DELETE", "/deadly_prompts/{hash}"),
    },
}


class Who(NamedTuple):
    """Someone who sends a request. `origin`, `host`: {own} stands for the listener."""

    name: str
    port: str
    peer: str = "127.0.0.1"
    host: str = "{own}"
    headers: tuple[str, ...] = ()
    has_key: bool = False


CLIENT = Who("client", "clients")
KEYED_CLIENT = Who("client with the key", "clients", has_key=True)
CROSS_SITE = Who(
    "page of another site",
    "admin",
    headers=("origin: http://evil.example", "sec-fetch-site: cross-site", "sec-fetch-mode: no-cors"),
)
REBINDING = Who(
    "page of a name that leads here",
    "admin",
    host="evil.example",
    headers=("origin: http://evil.example", "sec-fetch-site: same-origin"),
)
OWN_PAGE = Who("own page", "admin", headers=("origin: http://{own}", "sec-fetch-site: same-origin"))
LOOPBACK = Who("peer on loopback", "admin")
REMOTE = Who("other peer", "admin", peer="127.0.0.2")
KEYED_REMOTE = Who("other peer with the key", "admin", peer="127.0.0.2", has_key=True)
EVERYONE = (CLIENT, KEYED_CLIENT, CROSS_SITE, REBINDING, OWN_PAGE, LOOPBACK, REMOTE, KEYED_REMOTE)

_LOCAL = {OWN_PAGE, LOOPBACK, KEYED_REMOTE}
MAY: dict[str, set[Who]] = {
    "probes": set(EVERYONE),
    "the page": {KEYED_CLIENT, REMOTE} | _LOCAL,
    "models, health": {CLIENT, KEYED_CLIENT} | _LOCAL,
    "engines": {CLIENT, KEYED_CLIENT} | _LOCAL,
    "operators, reading": {KEYED_CLIENT} | _LOCAL,
    "operators, changing": {KEYED_CLIENT} | _LOCAL,
}


def table() -> list[str]:
    """The rows of the documentation."""
    head = ["| routes |", "|---|"]
    for who in EVERYONE:
        port = "--port" if who.port == "clients" else "admin listener"
        head[0] += f" {who.name} (`--port`) |" if port == "--port" else f" {who.name} |"
        head[1] += "---|"
    return head + [
        f"| {kind} |" + "".join(f" {'yes' if who in MAY[kind] else 'no'} |" for who in EVERYONE)
        for kind in HTTP
    ]


def test_documented() -> None:
    """The documentation has this table."""
    text = DOCS.read_text()

    assert "\n".join(table()) in text, "\n".join(table())


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.usefixtures("remote_peers")
async def test_every_route(fleet_of: FleetOf, tmp_path: Path, has_key: bool) -> None:
    """Each route has a row; all for whom that says no get 401, 403, or on the clients' port 404."""
    file = tmp_path / "key"
    file.write_text(KEY)
    async with fleet_of(*(("--admin-key-file", str(file)) if has_key else ())) as fleet:
        before = await _state(fleet)
        assert await _routes(fleet.frontend.admin_url) == set().union(*HTTP.values())
        if has_key:
            assert await _routes(fleet.url) == set().union(*HTTP.values())
        wrong = []
        for kind, routes in HTTP.items():
            for method, path in sorted(routes):
                for who in EVERYONE:
                    may = who in MAY[kind] and (has_key or not who.has_key or _may_without(who, kind))
                    status = await _status(fleet, who, method, path)
                    if may == _is_refused(who, status, kind, has_key=has_key):
                        wrong.append((who.name, method, path, status))

        assert not wrong
        assert before == await _state(fleet)


def _may_without(who: Who, kind: str) -> bool:
    """Whether someone whose key is that of no replica may do it all the same."""
    return (CLIENT if who.port == "clients" else REMOTE) in MAY[kind]


def _is_refused(who: Who, status: int, kind: str, *, has_key: bool) -> bool:
    """Without a key the clients' port has no routes for operators, and the admin listener asks for none."""
    if who.port == "clients":
        return CLIENT not in MAY[kind] and status == (401 if has_key else 404)
    return status in ({401, 403} if has_key else {403})


async def _routes(url: str) -> set[tuple[str, str]]:
    paths = (await get(url, "/openapi.json")).json["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


async def _state(fleet: Fleet) -> Any:
    """What the routes that change something would change."""
    return [(await fleet.get(path)).json for path in ("/routing", "/busy_threshold")]


async def _status(fleet: Fleet, who: Who, method: str, path: str) -> int:
    """The status of one request; the answer may go on."""
    url = fleet.url if who.port == "clients" else fleet.frontend.admin_url
    own = urlsplit(url).netloc
    headers = [line.replace("{own}", own) for line in who.headers]
    if who.has_key:
        headers.append(f"authorization: Bearer {KEY}")
    async with _connected(url, who) as client:
        client.host = who.host.replace("{own}", own)
        target = path.replace("{model}", "m").replace("{worker_id}", "w0").replace("{request_id}", "x")
        target = target.replace("{file}", "page.js")
        if method != "GET":
            headers.append("content-type: application/json")
        body = b"" if method == "GET" else json.dumps({"model": "nobody's"}).encode()
        client.send(body, *headers, path=target, method=method)
        return int((await client.read_until(b"\r\n\r\n"))[9:12])


@contextlib.asynccontextmanager
async def _connected(url: str, who: Who) -> AsyncIterator[Client]:
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port, local_addr=(who.peer, 0))
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


FREE = {("GET", "/live"), ("GET", "/ready"), ("GET", "/openapi.json")}


async def test_every_route_with_keys(fleet_of: FleetOf, ring: Ring) -> None:
    """A client without a key gets nothing but FREE; with one what is for its models, and nothing of others.

    Every way to name a model of another tenant is tried on every route; no engine gets such a request.
    """
    mine, others = ring.add("mine", "--model", "m"), ring.add("others", "--model", "theirs")
    expired = ring.add("expired", "--expires", "2020-01-01")
    async with fleet_of(*ring.flags, "--model-alias", "alias=m", scripts=(OK,)) as fleet:
        assert await _routes(fleet.frontend.admin_url) == set().union(*HTTP.values())
        before = await _state(fleet)
        wrong: list[Any] = []
        for kind, routes in HTTP.items():
            for method, path in sorted(routes):
                free = (method, path) in FREE
                for keys in ((), (expired,), ("authorization: Bearer kvr_0123456789abcdef_x",)):
                    answered = await _ask(fleet, method, path, *keys)
                    if free == (answered.status == 401) or b"w0" in answered.head + answered.body:
                        wrong.append((keys, method, path, answered.status))
                may = free or kind in {"models, health", "engines"}
                answered = await _ask(fleet, method, path, mine, model="m")
                if may == (answered.status in {401, 403}) or b"w0" in answered.head + answered.body:
                    wrong.append((mine, method, path, answered.status))
        assert not wrong
        assert before == await _state(fleet)

        served = len(fleet.requests)
        for method, path in sorted(HTTP["engines"]):
            for model in ("m", "alias", None):
                for place in ("body", "query", "form"):
                    answered = await _ask(fleet, method, path, others, model=model, place=place)
                    # a form is no JSON, whatever is in it
                    assert answered.status in {403, 400 if place == "form" else 403}, (
                        method,
                        path,
                        model,
                        place,
                    )
                    assert b"`m`" not in answered.body
        assert served == len(fleet.requests)


async def _ask(
    fleet: Fleet,
    method: str,
    path: str,
    *headers: str,
    model: str | None = "m",
    place: str = "body",
    more: dict[str, Any] = {},  # noqa: B006  (never changed)
) -> Response:
    """One request of a client, which names the model in this place. `more`: other fields of its body."""
    path = path.replace("{model}", "m").replace("{worker_id}", "w9").replace("{request_id}", "x")
    path = path.replace("{file}", "page.js").replace("{hash}", "00" * 16)
    kind, body = "application/json", b""
    fields = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    if place == "query" and model is not None:
        path += f"?model={model}"
    if method != "GET":
        body = json.dumps(
            fields | more | ({"model": model} if place == "body" and model is not None else {})
        ).encode()
    if place == "form" and method != "GET":
        part = f'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n{model}\r\n' if model else ""
        body, kind = f"{part}--b--\r\n".encode(), "multipart/form-data; boundary=b"
    async with fleet.connected() as client:
        client.send(body, *headers, f"content-type: {kind}", path=path, method=method)
        return await client.response()


CHOICES = (
    ("x-kvrouter-target: w0", "x-kvrouter-mode: direct"),
    ("x-kvrouter-mode: p2c",),
    ("x-kvrouter-overlap-weight: 2",),
    ("x-kvrouter-temperature: 2",),
    ("x-kvrouter-priority: -9",),
    ("x-kvrouter-dry-run: true",),
)


async def test_every_choice_on_every_route(fleet_of: FleetOf, ring: Ring) -> None:
    """A key without overrides chooses nothing by a header or a field, on no route that reaches an engine."""
    key = ring.add("a")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        for method, path in sorted(HTTP["engines"]):
            fields: list[dict[str, Any]] = [{"priority": -9}, {"parameters": {"routed_dp_rank": 0}}]
            for headers in CHOICES:
                assert 403 == (await _ask(fleet, method, path, key, *headers)).status, (method, path, headers)
            for more in fields if method != "GET" else ():
                assert 403 == (await _ask(fleet, method, path, key, more=more)).status, (method, path, more)
        assert not fleet.requests


async def test_prefixes_on_every_route(fleet_of: FleetOf, ring: Ring) -> None:
    """With --tenant-cache-salt engines get no body of a tenant without its salt, or the route is closed.

    A form has a file, and what is read in a GET is no prompt.
    """
    one, two = ring.add("one", "--cache-salt", "1"), ring.add("two", "--cache-salt", "2")
    async with fleet_of(*ring.flags, "--tenant-cache-salt", scripts=(OK,)) as fleet:
        for method, path in sorted(HTTP["engines"]):
            for key, salt in ((one, "1:own"), (two, "2:own")):
                before = len(fleet.requests)
                status = (await _ask(fleet, method, path, key, more={"cache_salt": "own"})).status
                if path in engine_routes.UNSALTED:
                    assert (403, before) == (status, len(fleet.requests))
                elif method != "GET" and path not in engine_routes.FORMS:
                    assert 200 == status, path
                    assert salt == fleet.workers[0].requests[-1].json["cache_salt"], path


async def test_sessions_on_every_route(fleet_of: FleetOf, ring: Ring) -> None:
    """One name for a session is one for each tenant, whichever route it is used on."""
    keys = [ring.add(name) for name in ("one", "two")]
    async with fleet_of(*ring.flags, "--session-affinity", "hard", scripts=(OK, OK)) as fleet:
        for method, path in sorted(HTTP["engines"]):
            for key in keys:
                assert 200 == (await _ask(fleet, method, path, key, "x-session-id: s")).status, path
        (router,) = fleet.frontend.replica.routers.values()
        names = {name for name, *_ in router.tables.sessions.newest(0.0, 100) if name_of(name) == "s"}
        assert {
            owned("s", Key(id="0" * 16, sha256="0" * 64, tenant=one).owner) for one in ("one", "two")
        } == names


async def test_any_bytes_as_key(fleet_of: FleetOf, ring: Ring) -> None:
    """Whatever stands in the headers for a key: 401, or 400 for what is no header; no engine is asked."""
    good = ring.add("a").rpartition(" ")[2]
    rng = random.Random(1)
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        for turn in range(400):
            raw = bytearray(good.encode())
            for _ in range(rng.randrange(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            cut, noise = raw[: rng.randrange(len(raw))], rng.randbytes(rng.choice((0, 1, 40, 3000)))
            value = rng.choice((raw, cut, noise, raw + noise, noise + raw)).replace(b"\n", b"")
            start = (b"authorization: Bearer ", b"authorization: ", b"x-api-key: ", b"authorization:Basic ")[
                turn % 4
            ]
            if good.encode() in value:
                continue
            async with fleet.connected() as client:
                head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n%b%b\r\n\r\n{}"
                client.writer.write(head % (start, bytes(value)))
                assert (await client.response()).status in {400, 401}, (start, value)
        asked = [
            one.head for one in fleet.workers[0].requests
        ]  # a GET is nobody's here: of another test's agent
        assert not [head for head in asked if not head.startswith(b"GET ")]
