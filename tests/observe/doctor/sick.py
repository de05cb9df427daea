"""A namespace of processes that a test makes up, and examinations of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.config import NamespaceOptions
from kvrouter.core.wire.heartbeats import Card, RankBeat, RouterBeat, State, WorkerBeat
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.observe.doctor.examination import examine
from kvrouter.observe.doctor.findings import DoctorReport
from kvrouter.observe.doctor.settings import DoctorSettings

POOL = PoolId("m-12345678")
NOW_US = 1_000_000
CLOSED = "http://127.0.0.1:9"
"""A URL at whose port no program listens."""
Answers = Mapping[str, Any]
"""By path: a body for status 200, or (status, body), or a function that makes one for each request."""


@contextlib.asynccontextmanager
async def answering(answers: Answers) -> AsyncIterator[str]:
    """A server with these answers, also below `/x`, so that one server has several URLs; else 404."""

    async def answer(request: web.Request) -> web.Response:
        path = (
            request.path
            if request.path in answers
            else f"/{request.path.partition('/')[2].partition('/')[2]}"
        )
        found = answers.get(path, (404, {}))
        made = found() if callable(found) else found
        status, body = made if isinstance(made, tuple) else (200, made)
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def engine(model: str = "m", metrics: str | Callable[[], str] = "", **answers: Any) -> Answers:
    """The answers of a healthy engine, or of one with other answers, by path without its slash."""
    models = {"data": [{"id": model, "object": "model", "owned_by": "vllm"}]}
    usual = {"/v1/models": models, "/health": "", "/metrics": metrics}
    return usual | {f"/{path}": answer for path, answer in answers.items()}


def replica(router_id: str, **parts: Any) -> dict[str, Any]:
    """The answers of a healthy replica; `parts` replaces keys of /workers, or whole answers by path."""
    workers = {"router_id": router_id, "replica_sync": True, "namespace_peers": [], "peers": [], "pools": []}
    workers |= {"targets": [], "feeds": [], "bookings": [], "tokens": {}}
    answers: dict[str, Any] = {
        "/health": {"router_id": router_id, "version": "0.1.0"},
        "/ready": {"status": "ready", "reasons": []},
        "/routing": {"revision": 0, "by": "", "not_applied": {}},
        "/metrics": "",
    }
    for name, part in parts.items():
        (answers if name.startswith("/") else workers)[name] = part
    return {"/workers": workers} | answers


@dataclass
class Namespace:
    """Processes that answer a hello with prepared messages, as agents and replicas do with heartbeats."""

    nats: str
    bus: Bus
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    messages: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.name)

    async def begin(self) -> None:
        """Answer hellos from now on."""
        await self.bus.subscribe(self.subjects.hello, self._answer)
        await self.bus.flush(10.0)  # the server knows of it before the doctor asks

    def worker(
        self,
        worker_id: str,
        url: str | None = None,
        state: State = "up",
        *ranks: RankBeat,
        incarnation: int = NOW_US,
        **card: Any,
    ) -> None:
        """One heartbeat; without a URL it has no card."""
        facts = {"model": "m", "block_size": 16, "started_at_us": NOW_US, **card}
        whole = Card(worker_id=worker_id, url=url, **facts) if url is not None else None
        beat = WorkerBeat(VERSION, incarnation, state, POOL, list(ranks), 1, whole)
        self.raw(self.subjects.live_worker(WorkerId(worker_id)), encode_beat(beat))

    def replica(self, router_id: str, address: str = "") -> None:
        """Two heartbeats of a replica."""
        beat = RouterBeat(VERSION, NOW_US, "up", address, {}, 1)
        for _ in range(2):
            self.raw(self.subjects.live_router(RouterId(router_id)), encode_beat(beat))

    def raw(self, subject: str, payload: bytes) -> None:
        """Any message."""
        self.messages.append((subject, payload))

    async def beat(self) -> None:
        """A heartbeat of a worker, again and again."""
        self.worker("w")
        while True:
            self._answer("", b"", "")
            await asyncio.sleep(0.02)

    async def examine(self, **settings: Any) -> DoctorReport:
        """The doctor's report on it."""
        return await examination(self.nats, self.name, **settings)

    def _answer(self, _subject: str, _data: bytes, _reply: str) -> None:
        for subject, payload in self.messages:
            self.bus.publish(subject, payload)


@contextlib.asynccontextmanager
async def sick_namespace(nats: str) -> AsyncIterator[Namespace]:
    """A namespace in which nothing lives yet."""
    async with Bus.open(NatsOptions((nats,)), name="test") as bus:
        connected = asyncio.Event()
        bus.on_connect(connected.set)
        await connected.wait()
        namespace = Namespace(nats, bus)
        await namespace.begin()
        yield namespace


async def examination(nats: str, namespace: str, **settings: Any) -> DoctorReport:
    """A short one."""
    bus = NamespaceOptions(NatsOptions(tuple(nats.split(","))), namespace)
    return await examine(DoctorSettings(**{"listen_s": 0.5, "timeout_s": 20.0, "bus": bus, **settings}))


def codes(report: DoctorReport) -> dict[str, list[str]]:
    """What each kind of finding is about, by code."""
    found: dict[str, list[str]] = {}
    for finding in report.findings:
        found.setdefault(finding.code, []).append(finding.about)
    return found


def seen(report: DoctorReport, code: str) -> str:
    """The text of the only finding of a kind."""
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding.seen
