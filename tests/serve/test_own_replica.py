"""Whether a replica of `kvrouter serve` is ready, and what else may answer on its port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from aiohttp import web

from kvrouter.errors import ConfigError
from kvrouter.processes.children import Child
from kvrouter.serve.own_replica import OwnReplica, Place, session

PID = 4711
STARTING = {"status": "starting", "reasons": ["no worker has been seen", "NATS: refused"]}


@dataclass
class FakeChild:
    """A process, which runs or does not."""

    pid: int | None = PID
    name: str = "frontend-1"


@dataclass
class Listener:
    """What answers on a port: body and status by path."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        status, body = self.answers.get(request.path, (404, b"not here"))
        return web.Response(status=status, body=body)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Listener]:
        app = web.Application()
        app.router.add_get("/{rest:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = site.name
        try:
            yield self
        finally:
            await runner.cleanup()


def replica(status: int = 200, readiness: Any = None, pid: Any = PID) -> Listener:
    """The child's own listener."""
    health, ready = json.dumps({"pid": pid}).encode(), json.dumps(readiness).encode()
    return Listener({"/health": (200, health), "/ready": (status, ready)})


async def reason_of(own: OwnReplica) -> str:
    """Why it is not ready, of one look: `until_ready` says it every few seconds."""
    return await own._why_not_ready()


async def why(admin: Listener, clients: Listener, child: FakeChild | None = None) -> str:
    """Why the replica is not ready."""
    async with admin.serving(), clients.serving(), session() as http:
        places = Place(admin.url, "--admin-port"), Place(clients.url, "--port")
        return await reason_of(OwnReplica(http, cast("Child", child or FakeChild()), places))


async def test_own_replica() -> None:
    """It is ready when /ready answers 200; before that its reasons are given."""
    assert not await why(replica(), replica())
    assert "/ready answers 503: no worker has been seen; NATS: refused" == await why(
        replica(503, STARTING), replica()
    )
    assert "/ready answers 503: draining" == await why(replica(503, {"status": "draining"}), replica())
    assert "/ready answers 500: no reason" == await why(replica(500, "?"), replica())
    assert "it does not run" == await why(replica(), replica(), FakeChild(pid=None))


OTHERS = [
    Listener({}),
    Listener({"/health": (200, b"ok"), "/ready": (200, b"ok")}),
    Listener({"/health": (200, b'{"pid": "x"}'), "/ready": (200, b"{}")}),
    Listener({"/health": (500, b""), "/ready": (200, b"")}),
    replica(pid=PID + 1),
    replica(pid=None),
]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("is_admin", [True, False])
async def test_another_program(other: Listener, *, is_admin: bool) -> None:
    """A program on either port, a replica of another fleet too, is an error that names the flag."""
    listeners = (other, replica()) if is_admin else (replica(), other)
    flag = "--admin-port" if is_admin else "--port"
    with pytest.raises(ConfigError, match=f"another program answers at http://.*give another {flag}$"):
        await why(*listeners)


async def test_child_that_has_just_ended() -> None:
    """The answer of a child that was started again meanwhile is not that of another program."""

    class Restarted(FakeChild):
        looks = 0

        @property
        def pid(self) -> int:
            self.looks += 1
            return PID + self.looks

        @pid.setter
        def pid(self, _pid: int | None) -> None:
            pass

    assert "it has just ended" == await why(replica(), replica(), Restarted())


async def test_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that does not listen yet is waited for."""
    admin, clients = replica(), replica()
    async with admin.serving():
        pass
    async with clients.serving(), session() as http:
        places = Place(admin.url, "--admin-port"), Place(clients.url, "--port")
        own = OwnReplica(http, cast("Child", FakeChild()), places)
        assert "/health: connection refused" == await reason_of(own)
        waiting = asyncio.create_task(own.until_ready())
        answers = iter(["no", "no", ""])

        async def next_answer() -> str:
            return next(answers)

        monkeypatch.setattr("kvrouter.serve.own_replica.LOOK_S", 0.001)
        monkeypatch.setattr(own, "_why_not_ready", next_answer)
        async with asyncio.timeout(10):
            await waiting
