"""`kvrouter verify --owners`: replicas with the same error, and agents that contradict their engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter import KvPublisher, announce, connect
from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import SnapshotChunk, Stored, encode
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.observe.engine import EngineAccess
from kvrouter.observe.verify import engines, owners
from kvrouter.observe.verify.command import main
from kvrouter.observe.verify.comparison import OwnersView
from kvrouter.observe.verify.owners import Owners
from tests.e2e.fleet import running_fleet
from tests.frontend.workers import until_found

TOKENS = list(range(64))
PATIENCE_S = 60.0
Json = dict[str, Any]


@contextlib.asynccontextmanager
async def answering(body: Json) -> AsyncIterator[str]:
    """A replica that answers /workers with this."""
    app = web.Application()

    async def workers(_: web.Request) -> web.Response:
        return web.json_response(body)

    app.router.add_get("/workers", workers)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def with_invented_block(body: Json) -> Json:
    """The same answer with one block more on every target."""
    for target in body["targets"]:
        for tier in target["tiers"]:
            tier["blocks"] += 1
            tier["digest"] = f"{(int(tier['digest'], 16) + 12345) % (1 << 64):016x}"
    return body


async def verify(*flags: str) -> int:
    """Run the command in a thread: the fleet uses the event loop."""
    return await asyncio.to_thread(main, flags)


async def test_replicas(nats_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas that equal their owners; and two that agree and are both wrong."""
    namespace, file = uuid.uuid4().hex, tmp_path / "verify.json"
    asked = ("--owners", "--nats", nats_url, "--namespace", namespace, "--timeout", "60")
    async with running_fleet(nats_url, namespace, mockers=2) as fleet:
        urls = [frontend.admin_url for frontend in fleet.frontends]
        for url in urls:
            body = {"model": "tiny", "prompt": TOKENS, "max_tokens": 2}
            async with fleet.http.post(f"{url}/v1/completions", json=body) as response:
                assert 200 == response.status
        assert 0 == await verify("--replica", urls[0], "--replica", urls[1], *asked, "--json", str(file))
        rows = [row for row in json.loads(file.read_text())["rows"] if row["agent"]]
        assert [("equal", "equal", 3)] * 2 == [(row["agent"], row["engine"], row["parties"]) for row in rows]
        assert 0 == await verify("--replica", urls[0], *asked)
        assert "their owner was not compared" in capsys.readouterr().out

        wrong = [with_invented_block(view) for view in await fleet.views()]
        async with answering(wrong[0]) as one, answering(wrong[1]) as two:
            replicas = ("--replica", one, "--replica", two)
            assert 0 == await verify(*replicas)
            assert 1 == await verify(*replicas, *asked, "--timeout", "5", "--json", str(file))

    differences = json.loads(file.read_text())["differences"]
    assert any("its agent" in text and one in text for text in differences), differences


async def test_no_nats(
    free_port: Callable[[], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, and the server."""
    monkeypatch.setattr(owners, "CONNECT_TIMEOUT_S", 0.1)
    nats = f"nats://127.0.0.1:{free_port()}"
    assert 2 == await verify("--replica", "u", "--owners", "--nats", nats)

    assert f"--nats {nats}" in capsys.readouterr().err


class Worker:
    """An engine, and an agent that publishes what the test wants."""

    def __init__(self, mocker: Mocker, publisher: KvPublisher, owners: Owners, http: aiohttp.ClientSession):
        self.mocker = mocker
        self.publisher = publisher
        self.owners = owners
        self._http = http

    async def until(self, is_so: Callable[[OwnersView], bool]) -> OwnersView:
        """Take looks until one shows this."""
        return await until_found(self.owners.look, is_so, within_s=PATIENCE_S)

    async def ask_engine(self) -> None:
        """Send a request directly to the engine, so that it has blocks."""
        body = {"model": "m", "prompt": TOKENS, "max_tokens": 1}
        async with self._http.post(f"{self.mocker.url}/v1/completions", json=body) as response:
            assert 200 == response.status


@contextlib.asynccontextmanager
async def running_worker(nats_url: str, namespace: str) -> AsyncIterator[Worker]:
    """An announced worker that `Owners` has found."""
    async with contextlib.AsyncExitStack() as stack:
        config = MockerConfig(model_name="m", speedup=100.0)
        mocker = await stack.enter_async_context(running_mocker(config))
        nats = await stack.enter_async_context(connect(nats_url))
        publisher = KvPublisher(nats, "w", 16)
        announcing = announce(nats, [publisher], url=mocker.url, model="m", namespace=namespace)
        await stack.enter_async_context(announcing)
        opening = Owners.open(NatsOptions((nats_url,)), namespace, EngineAccess())
        owners = await stack.enter_async_context(opening)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Worker(mocker, publisher, owners, http)


def has_texts(*words: str) -> Callable[[OwnersView], bool]:
    """A condition: the texts of the engine checks contain all of these words."""

    def contains(view: OwnersView) -> bool:
        texts = [text for check in view.engines.values() for text in check.texts]
        return all(any(word in text for text in texts) for word in words)

    return contains


async def test_agent_and_engine(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the engine does not have, blocks that the agent lacks, then neither."""
    monkeypatch.setattr(engines, "FIRST_GAP_S", 0.05)
    monkeypatch.setattr(engines, "LONGEST_GAP_S", 0.05)
    async with running_worker(nats_url, uuid.uuid4().hex) as worker:
        worker.publisher.stored([1], [1] * 16)
        await worker.until(has_texts("publishes 1 block ("))
        await worker.ask_engine()
        await worker.until(has_texts("publishes 1 block (", "holds 4 blocks ("))
        worker.publisher.removed([1])
        worker.publisher.stored([2, 3, 4, 5], TOKENS)
        view = await worker.until(lambda view: all(check.is_final for check in view.engines.values()))

    assert ["equal"] == [check.verdict for check in view.engines.values()]
    assert () == view.errors


async def test_forged_answer(nats_url: str) -> None:
    """A process that answers in an agent's name is reported, even if its answer is used."""
    namespace = uuid.uuid4().hex
    subject = Subjects(namespace).kv_replay(WorkerId("w"))
    async with (
        running_worker(nats_url, namespace) as worker,
        Bus.open(NatsOptions((nats_url,)), name="forger") as forger,
    ):

        def answer(_subject: str, _data: bytes, reply: str) -> None:
            blocks = Stored(0, None, bytes(range(8)))
            forged = SnapshotChunk(1, 10**9, 0, 1, [blocks], worker.publisher.incarnation)
            forger.publish(reply, encode(forged))

        await forger.subscribe(subject, answer)
        view = await worker.until(lambda view: bool(view.errors))

    assert view.errors[0].startswith("agent w: a request to it had two answers")
