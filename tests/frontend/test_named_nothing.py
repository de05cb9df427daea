"""Without `headers` in --expose, nothing on the clients' port names a worker, its URL, a pool or a peer."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvrouter
from kvrouter.bodies.apis import unnamed
from kvrouter.errors import KvRouterError
from kvrouter.frontend.requests.accept import Accept
from kvrouter.frontend.requests.engine_routes import relayed
from tests.frontend.clients import ask, get
from tests.frontend.fleet import BODY, POOL, STREAM, FleetOf
from tests.frontend.workers import (
    OK,
    SSE_HEAD,
    answer,
    chunk,
    event,
    says,
    says_and_closes,
    says_and_resets,
    says_and_stalls,
    until,
)

NAMES = ("w0", "http://", "127.0.0.1", POOL)
SECRET = "w0 of pool p at http://10.0.0.7:8000, seen by peer r2"
HIDES = ("--expose", "none")
# What a message may not be made of, if its class says that it names nothing.
NAMING = frozenset(
    {
        "worker", "workers", "worker_id", "url", "urls", "target", "targets", "card", "pool", "pools", "peer",
        "peers", "router_id", "choice", "placement", "known",
    }
)  # fmt: skip
HARMLESS = {
    "dry_route.py: known": "the paths that a dry run may name",
    "lost_requests.py: len(found.workers)": "a number",
    "openai_client.py: worker_id": "no part of a replica",
    "overrides.py: target": "what the client has sent",
    "worker_blocks.py: worker_id": "what the client has sent, behind the gate",
    "asked.py: pool.model": "the model that a caller of placement asks for, behind the gate",
}


def _classes() -> list[type[KvRouterError]]:
    for module in pkgutil.walk_packages(kvrouter.__path__, "kvrouter."):
        if (
            not module.name.startswith(("kvrouter.compat", "kvrouter.core.native"))
            and "__main__" not in module.name
        ):
            importlib.import_module(module.name)
    found, left = [], [KvRouterError]
    while left:
        found.append(left.pop())
        left += found[-1].__subclasses__()
    return [one for one in dict.fromkeys(found) if one.__module__.startswith("kvrouter.")]


CLASSES = _classes()
SAYS_ALL = {one for one in CLASSES if vars(one).get("names_nothing")}


def _raised(kind: type[KvRouterError]) -> KvRouterError:
    """An error of this class that names what there is to name."""
    error = kind.__new__(kind)
    error.args = (SECRET,)
    for name in ("param", "allowed", "location", "worker_id", "body"):
        setattr(error, name, "x")
    error.status = max(error.status, 400)
    return error


async def test_every_error(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class keeps its message from clients unless it says itself that it names nothing."""
    raised: list[KvRouterError] = []

    async def work(*_: Any, **__: Any) -> None:
        raise raised[0]

    monkeypatch.setattr(Accept, "work", work)
    async with fleet_of(*HIDES, scripts=(OK,)) as fleet:
        for kind in CLASSES:
            raised[:] = [_raised(kind)]
            shown = (await fleet.ask()).body.decode()
            assert (SECRET in shown) == (kind in SAYS_ALL), kind
            if kind is KvRouterError:
                assert SECRET in (await ask(fleet.frontend.admin_url, BODY)).body.decode()
                assert SECRET in str(fleet.logged("request.failed"))
        fleet.trouble.logs.clear()


@pytest.mark.parametrize("path", [path for method, path, _ in relayed() if method == "POST"])
def test_every_form(path: str) -> None:
    """Nor does any form of an error in any API, as an answer or as an event."""
    api = next(unnamed(api) for _, one, api in relayed() if one == path)
    for kind in CLASSES:
        if kind not in SAYS_ALL:
            error = _raised(kind)
            given = api.error_answer(error, "r1")
            assert SECRET.encode() not in given.body + api.error_event(error) + str(given.headers).encode()


def _parts(call: ast.Call) -> Iterator[str]:
    """The values that a message is made of."""
    for one in ast.walk(call):
        if isinstance(one, ast.FormattedValue):
            yield ast.unparse(one.value)


def test_messages_that_clients_get() -> None:
    """What names nothing is made of nothing that could: this finds the next message that does."""
    found, says_all = [], {kind.__name__ for kind in SAYS_ALL}
    for file in Path(kvrouter.__path__[0]).rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in says_all:
                for part in _parts(call):
                    names = {
                        one.id if isinstance(one, ast.Name) else one.attr
                        for one in ast.walk(ast.parse(part))
                        if isinstance(one, ast.Name | ast.Attribute)
                    }
                    if names & NAMING:
                        found.append(f"{file.name}: {part}")

    assert sorted(HARMLESS) == sorted(found)


FAILING = {
    "dies": (says_and_resets(b""), 502),
    "dies amid its stream": (says_and_resets(SSE_HEAD, chunk(event("a"))), 200),
    "no HTTP": (says_and_closes(b"no HTTP http://127.0.0.1/w0\r\n\r\n"), 502),
    "is silent": (says_and_stalls(SSE_HEAD, chunk(event("a"))), 200),
    "has no end": (says(SSE_HEAD, chunk(event("a")) + b"0\r\n\r\n"), 200),
    "empty": (says(answer(b"")), 502),
}


@pytest.mark.parametrize("case", FAILING)
async def test_failing_workers(fleet_of: FleetOf, case: str) -> None:
    """However a worker fails, before its first byte or after it."""
    script, status = FAILING[case]
    flags = ("--retries", "0", "--idle-timeout-s", "0.05")
    async with fleet_of(*HIDES, *flags, scripts=(script,)) as fleet:
        failed = await fleet.ask(STREAM)
        fleet.announce(fleet.workers[0], state="down")
        await until(lambda: not fleet.targets(fleet.frontend), "the worker is down")
        nobody = await fleet.ask(STREAM)

        assert (status, 503) == (failed.status, nobody.status)
        for one in (failed, nobody):
            assert b"error" in one.body
            assert [] == [name for name in NAMES if name.encode() in one.head + one.body]


async def test_wrong_targets(fleet_of: FleetOf) -> None:
    """A client that names a worker learns nothing of others, nor of what state it is in."""
    async with fleet_of(*HIDES, scripts=(OK,) * 2) as fleet:
        for wanted in ("nobody", "w0/7", "w0/-1", "w1"):
            fleet.announce(fleet.workers[1], state="down")
            await until(lambda: len(fleet.targets(fleet.frontend)) == 1, "the worker is down")
            response = await fleet.ask(BODY, "x-kvrouter-mode: direct", f"x-kvrouter-target: {wanted}")

            assert response.status in {400, 404, 503}
            others = {"w0", "w1", *NAMES} - {wanted.partition("/")[0]}
            shown = response.body.replace(b"as in w1/0", b"")
            assert [] == [name for name in others if name.encode() in shown]


async def test_every_page(fleet_of: FleetOf) -> None:
    """No report that clients may read names them, in trouble or not; the admin listener names all."""
    async with fleet_of(*HIDES, scripts=(OK,), replicas=2) as fleet:
        first, peer = fleet.frontends
        await until(lambda: first.admin.readiness()["status"] == "ready", "the first recovery is over")
        await until(lambda: first.replica.peers, "the replicas know each other")
        fleet.announce(fleet.workers[0], state="down")
        await until(lambda: not fleet.targets(first), "the worker is down")
        names = [*NAMES[:1], fleet.workers[0].url, POOL, peer.replica.router_id]
        spec = (await get(fleet.url, "/openapi.json")).json["paths"]
        pages = [path for path in spec if "get" in spec[path] and "{" not in path]
        assert {"/ready", "/health", "/live", "/v1/models"} <= set(pages)
        for path in (*pages, "/ready?verbose=1", "/v1/models/nobody", "/workers", "/"):
            shown = await get(fleet.url, path)
            assert [] == [name for name in names if name.encode() in shown.head + shown.body], path
        assert POOL in str((await get(fleet.frontend.admin_url, "/ready")).json["reasons"])
        assert [peer.replica.router_id] == (await get(fleet.frontend.admin_url, "/health")).json["peers"]
        assert (await get(fleet.url, "/health")).json["reasons"]
