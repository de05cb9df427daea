"""The command, its bounds, and what a hostile process can do to it."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter import cli
from kvrouter.bus import NatsOptions, Subjects
from kvrouter.config import NamespaceOptions
from kvrouter.core.wire.heartbeats import Card, WorkerBeat
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.observe.doctor import __main__ as command
from kvrouter.observe.doctor import examination, fleet_checks, machine, replica_checks, replicas
from kvrouter.observe.doctor.engine_checks import check_engines
from kvrouter.observe.doctor.examination import examine
from kvrouter.observe.doctor.findings import DoctorReport, Finding, clean
from kvrouter.observe.doctor.replicas import clients_url, read_series
from kvrouter.observe.doctor.report import as_json, as_text
from kvrouter.observe.doctor.settings import DoctorSettings
from kvrouter.observe.engine import EngineProbe, Engines
from kvrouter.observe.listening import HeardWorker, Listener
from kvrouter.observe.replica import Fetched, _skew_s, fetch, open_http
from kvrouter.worker.engines.metrics import EngineWork, read_work
from tests.certificates import Authority
from tests.observe.doctor.sick import CLOSED, answering, codes, engine, replica, seen, sick_namespace
from tests.observe.doctor.sick import examination as examined


def test_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    """Text and JSON, and the exit code of an error."""
    monkeypatch.setattr(command, "set_up_logs", lambda _: None)  # other tests read this process's logs
    words = ["doctor", "--nats", f"nats://127.0.0.1:{free_port()}", "--frontend-port", str(free_port())]
    code = cli.main(words)
    text = capsys.readouterr().out
    cli.main([*words, "--json"])
    body = json.loads(capsys.readouterr().out)

    assert 2 == code == body["exit_code"]
    assert "error    A NATS server does not answer [nats.unreachable]" in text
    assert text.endswith("1 error, 0 warnings, 0 notes; exit code 2\n")
    assert ["nats.unreachable"] == [group["code"] for group in body["groups"]]
    assert {"error": 1, "warning": 0, "note": 0} == body["counts"]


def test_a_large_fleet_is_a_page() -> None:
    """A fault of a thousand workers is five lines and a count; its JSON has a hundred rows."""
    findings = [Finding("engine.unreachable", f"w{n}", "refused") for n in range(1000)]
    report = DoctorReport("fleet", [*findings, Finding("nats.slow", "n", "slow")], {}, 1.0)
    text, body = as_text(report), json.loads(as_json(report))

    assert len(text.splitlines()) < 25
    assert "[engine.unreachable] (1000 times)" in text
    assert "- … and 995 more" in text
    assert text.index("engine.unreachable") < text.index("nats.slow")
    assert (1000, 100) == (body["groups"][0]["count"], len(body["groups"][0]["findings"]))


def test_exit_codes() -> None:
    """0 up to notes, 1 with a warning, 2 with an error."""
    kinds = ("fleet.versions", "nats.slow", "nats.denied")
    findings = [Finding(code, "a", "b") for code in kinds]

    assert [0, 0, 1, 2] == [DoctorReport("", findings[:count], {}, 0.0).exit_code for count in range(4)]


def test_texts_of_others_are_cleaned() -> None:
    """No escape sequence, no second line, no endless text."""
    assert "a b" == clean("a\x1b\nb")
    assert 300 == len(clean("x" * 10**6))


async def test_a_check_that_fails(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a finding itself, and the others go on."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("why")

    async def fail_later(*_: object) -> None:
        fail()

    monkeypatch.setattr(fleet_checks, "check_agents", fail)
    monkeypatch.setattr(examination.Examination, "_compare", fail_later)
    async with sick_namespace(nats_url) as namespace, answering(engine()) as url:
        namespace.worker("w", url)
        report = await namespace.examine()

    assert {"doctor.failed": ["comparison", "agents"], "fleet.no_replicas": [namespace.name]} == codes(report)
    assert ["ZeroDivisionError: why"] * 2 == [f.seen for f in report.findings if f.kind.area == "doctor"]


async def test_no_time(nats_url: str) -> None:
    """Engines that never answer: the run ends in time, and says what was not examined."""

    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", never)
    async with TestServer(app) as server, sick_namespace(nats_url) as namespace:
        namespace.worker("w", str(server.make_url("")).rstrip("/"))
        report = await namespace.examine(timeout_s=2.4)

    assert {"doctor.unfinished", "fleet.no_replicas"} <= codes(report).keys()
    assert report.seconds < 10


async def test_hostile_answers(nats_url: str) -> None:
    """A replica and an engine that answer anything at all are findings, and nothing raises."""
    chance = random.Random(1)
    parts: list[object] = [
        None,
        -1,
        1e308,
        "x" * 5000,
        [],
        {},
        [[]],
        {"pools": 3},
        "\x1b[2J",
        True,
        {"p": None},
    ]

    def anything() -> object:
        made = {key: chance.choice(parts) for key in replica("r")["/workers"]}
        return chance.choice([*parts, made, made, made, made])

    async with AsyncExitStack() as stack:
        namespace = await stack.enter_async_context(sick_namespace(nats_url))
        for number in range(20):
            answers = replica(f"r{number}") | {
                path: anything() for path in ("/workers", "/ready", "/routing", "/metrics", "/v1/route")
            }
            namespace.replica(f"r{number}", await stack.enter_async_context(answering(answers)))
        for number in range(20):
            answers = dict(engine()) | {path: anything() for path in ("/v1/models", "/metrics", "/health")}
            namespace.worker(f"w{number}", await stack.enter_async_context(answering(answers)))
        report = await namespace.examine()

    assert "doctor.failed" not in codes(report)
    assert "\x1b" not in as_text(report)
    assert codes(report)["replica.not_operators"]
    assert codes(report)["engine.other_model"]


async def test_endless_answer() -> None:
    """A body without end is not read to its end."""

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while not (request.transport is None or request.transport.is_closing()):
            await response.write(b"x" * 65536)
        return response

    app = web.Application()
    app.router.add_get("/", endless)
    async with TestServer(app) as server, open_http(None, "--tls-ca") as http:
        fetched = await fetch(http, str(server.make_url("/")), most_bytes=1 << 20)

    assert 0 == fetched.status
    assert "more than" in fetched.trouble


async def test_certificates(nats_url: str, tmp_path: Path) -> None:
    """An unknown authority is named; with it given, only the near end of the certificate is."""
    authority = Authority(tmp_path)

    async with sick_namespace(nats_url) as namespace:
        app = web.Application()

        async def answer(request: web.Request) -> web.Response:
            return web.json_response(engine()[request.path])

        app.router.add_get("/{path:.*}", answer)
        server = TestServer(app, scheme="https")
        await server.start_server(ssl=authority.server())
        namespace.worker("w", str(server.make_url("")).rstrip("/"))
        unknown = await namespace.examine()
        known = await namespace.examine(worker_tls_ca=authority.file)
        await server.close()

    assert ["w"] == codes(unknown)["tls.not_trusted"]
    assert "issuer" in seen(unknown, "tls.not_trusted")
    assert "tls.not_trusted" not in codes(known)


def test_certificate_that_expires() -> None:
    """An hour before its end."""
    listener = Listener(Subjects("n"))
    card = Card(worker_id="w", url="https://e", model="m", block_size=16)
    listener.workers[WorkerId("w")] = HeardWorker(WorkerBeat(VERSION, 1, "up", "p", [], 1, card), card=card)
    engines = Engines(cast("aiohttp.ClientSession", None), None)
    models = Fetched(200, expires_s=3600.0)
    engines.met["https://e"] = EngineProbe("https://e", models, models, ("m",))

    (found,) = check_engines(listener, engines, {})

    assert ("tls.expires", "https://e", "in 0.0 days") == (found.code, found.about, found.seen)


async def test_open_admin_listener(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that also answers at an address of the machine that is not loopback."""
    monkeypatch.setattr(replicas, "is_loopback", lambda host: host == "127.0.0.1")
    monkeypatch.setattr(machine, "own_addresses", lambda: ["localhost"])  # stands for an outer address
    async with sick_namespace(nats_url) as namespace, answering(replica("r")) as url:
        namespace.replica("r", url)
        report = await namespace.examine()

    assert f"{url.replace('127.0.0.1', 'localhost')}/routing answers without a key" == seen(
        report, "replica.admin_open"
    )


async def test_clients_port(nats_url: str) -> None:
    """A replica whose clients' port does not answer, and one that listens on every address."""
    async with sick_namespace(nats_url) as namespace, answering({"/live": "ok"}) as clients:
        health = {"router_id": "r", "url": CLOSED}
        async with answering(replica("r", **{"/health": health})) as url:
            namespace.replica("r", url)
            report = await namespace.examine()

    assert f"{CLOSED}: connection refused" == seen(report, "replica.clients_port")
    assert "http://10.0.0.1:8000" == clients_url("http://10.0.0.1:8100", "http://0.0.0.0:8000")
    assert "" == clients_url("http://10.0.0.1:8100", "http://127.0.0.1:8000")
    assert clients == clients_url("http://127.0.0.1:1", clients)


async def test_ports(nats_url: str, free_port: Callable[[], int]) -> None:
    """Where no replica is heard: who has the ports of a frontend."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with sick_namespace(nats_url) as namespace:
            namespace.worker("w")
            report = await namespace.examine(frontend_port=taken.getsockname()[1])
    async with answering({"/health": {"router_id": "other", "version": "0.1.0"}}) as url:
        nats = NatsOptions((f"nats://127.0.0.1:{free_port()}",))
        settings = DoctorSettings(frontend_port=int(url.rpartition(":")[2]), bus=NamespaceOptions(nats, "n"))
        other = await examine(settings)

    assert "another program answers there" == seen(report, "machine.port_taken")
    assert "replica other, version 0.1.0" == seen(other, "machine.other_fleet")


def test_clocks() -> None:
    """The header has whole seconds, so up to one second is no difference."""
    date = "Mon, 23 Nov 2026 12:00:00 GMT"
    noon = 1795435200.0

    assert 0.0 == _skew_s(date, noon + 0.1, noon + 0.2)
    assert 0.0 == _skew_s(date, noon + 0.9, noon + 1.0)
    assert -9.0 == _skew_s(date, noon + 10, noon + 10)
    assert 10.0 == _skew_s(date, noon - 10, noon - 10)
    assert _skew_s("yesterday", noon, noon) is None
    (found,) = machine.check_clocks({"u": -9.0, "v": 2.0}, {})
    assert ("u", "9 s behind this machine") == (found.about, found.seen)


def test_work() -> None:
    """More tokens than unfinished blocks can hide prove a stored block; unknown numbers prove nothing."""
    before = read_work(b'vllm:generation_tokens_total 100\nvllm:request_success_total{r="a"} 1\n')
    later = read_work(
        b'vllm:generation_tokens_total 164.0\nvllm:request_success_total{r="a"} 2\n'
        b'vllm:request_success_total{r="b"} 1\nvllm:generation_tokens_total_x 9\n'
    )

    assert later.surely_filled(before, running=1, block_size=16)
    assert not later.surely_filled(before, running=2, block_size=16)
    assert not EngineWork(100).surely_filled(EngineWork(), 0, 16)
    assert EngineWork() == read_work(b"vllm:generation_tokens_total e\n")


def test_series() -> None:
    """Sums over labels; nonsense is left out."""
    both = b'process_open_fds{process="0"} 1.0\nprocess_open_fds{process="1"} 2.0\n'

    assert {"process_open_fds": 3} == read_series(both + b"process_max_fds 1e300\nprocess_threads 3\n")


def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A low hard limit of this machine."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    (found,) = machine.check_descriptors()

    assert ("machine.descriptors", True) == (found.code, "at most 1024" in found.seen)


def test_silence_between_heartbeats() -> None:
    """Four intervals without a heartbeat, at the end or in between; two are no finding."""
    card = Card(worker_id="w", url="http://e", model="m", block_size=16)
    listener = Listener(Subjects("n"))
    for name, times in {"well": (0, 1, 3, 4), "gap": (0, 1, 5, 6), "silent": (0, 1, 2)}.items():
        one = listener.workers[WorkerId(name)] = HeardWorker(
            WorkerBeat(VERSION, 1, "up", "p", [], 1), card=card
        )
        for at in times:
            one.sender.beat(1, 1000, float(at))

    found = fleet_checks.check_agents(listener, 6.0, is_whole=True)
    cut_off = fleet_checks.check_agents(listener, 6.0, is_whole=False)

    assert ["gap", "silent"] == [one.about for one in found if one.code == "agent.late"]
    assert ["gap"] == [one.about for one in cut_off if one.code == "agent.late"]


def test_no_block_since_the_start() -> None:
    """An engine has filled blocks, ever or just now, and replicas know none; with one all is well."""
    listener = Listener(Subjects("n"))
    card = Card(worker_id="w", url="http://e", model="m", block_size=16)
    listener.workers[WorkerId("w")] = HeardWorker(WorkerBeat(VERSION, 1, "up", "p", [], 1, card), card=card)
    engines = Engines(cast("aiohttp.ClientSession", None), None)
    answer = Fetched(200)
    work = EngineWork(1000, 2)
    engines.met["http://e"] = EngineProbe("http://e", answer, answer, ("m",), "", work)
    engines.later["http://e"] = work

    ever = [*check_engines(listener, engines, {"w": 0})]
    engines.later["http://e"] = EngineWork(1100, 4)
    just_now = [*check_engines(listener, engines, {"w": 0})]

    assert ["engine.no_blocks_known"] == [found.code for found in ever]
    assert ["engine.no_blocks"] == [found.code for found in just_now]
    assert [] == [*check_engines(listener, engines, {"w": 1})]  # equal answers make no new block
    assert [] == [*check_engines(listener, engines, {})]


async def test_other_namespaces(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent namespace: those that are heard instead are named."""
    monkeypatch.setattr(examination, "OTHERS_S", 0.3)
    async with sick_namespace(nats_url) as namespace:
        beats = asyncio.create_task(namespace.beat())
        report = await examined(nats_url, "mistyped")
        beats.cancel()

    assert namespace.name in seen(report, "fleet.silent")


def test_differences_by_kind() -> None:
    """What `kvrouter verify` reports: a silent agent, contents that differ, and lack of time."""
    texts = (
        "blocks of w/0 in p: its agent: no answer within 2 s",
        "blocks of w/0 in p, as of frame 1:1: a holds device 1 (0), b device 2 (0)",
        "blocks of w/0 in p: a and b were never at the same frame (now 1:1 and 1:2)",
        "a does not see the replica b (http://b)",
    )

    found = [finding.code for finding in replica_checks.different(texts)]

    assert ["agent.no_answer", "replica.different", "replica.not_compared"] == found
