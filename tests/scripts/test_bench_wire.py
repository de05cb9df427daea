"""`scripts/bench relay` and `peers`: their arithmetic, and a small real run of each."""

from __future__ import annotations

import io
import json
import pstats
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrouter.core.fleet import router
from scripts.kit.bench import peers
from scripts.kit.bench.__main__ import main
from scripts.kit.bench.meter import group_cpu_ns, resident_bytes
from scripts.kit.bench.request import shares
from scripts.kit.bench.wire import installs, rounds, tables, targets, works
from scripts.kit.bench.wire.load import Report
from scripts.kit.bench.wire.rounds import Contender, Results, measure, run_rounds
from scripts.kit.bench.wire.routers import find_nginx, start_kvrouter
from scripts.kit.bench.wire.stage import open_stage
from scripts.kit.bench.wire.works import Run, Work, standard_works
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client
from tests.long import IS_LONG

REPORT = Report(
    requests=1000, errors=0, first_error="", reopened=0, seconds=2.0, latency_p50_us=300, latency_p90_us=500,
    latency_p99_us=900, ttft_p50_us=4000, ttft_p90_us=5000, ttft_p99_us=6000, gap_p50_us=5000,
    gap_p90_us=5100, gap_p99_us=5200, gap_max_us=9000, stalls=0, events=50_000, streams_open=64,
    bytes=1_000_000, cpu_s=0.5,
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs with short streams, and without a second of rest around each."""
    monkeypatch.setattr(rounds, "WARM_REQUESTS", 8)
    monkeypatch.setattr(works, "STREAM_EVENTS", 20)
    monkeypatch.setattr(works, "RAMP_MS", 50.0)
    monkeypatch.setattr(peers, "WARM_CHATS", 8)


def a_run(**figures: float) -> Run:
    """A run of 100 ms of CPU time, with other `figures`."""
    return replace(Run.of(REPORT, 100_000_000), **figures)


def results(**costs: float) -> Results:
    """Results of `short` only: CPU µs per request by contender."""
    names = {
        "ours": targets.OURS, "nginx": targets.NGINX, "vllm": targets.VLLM, "sglang": targets.SGLANG,
    }  # fmt: skip
    return Results(1, {("short", names[key]): a_run(cpu_us_per_request=cost) for key, cost in costs.items()})


def write(proc: Path, pid: int, group: int, used: int, kb: int) -> None:
    """A process as /proc shows it."""
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (task / "schedstat").write_text(f"{used} 0 1\n")
    (proc / str(pid) / "stat").write_text(f"{pid} (a ) name) S 1 {group} {group} 0\n")
    (proc / str(pid) / "status").write_text(f"Name:\tx\nVmRSS:\t  {kb} kB\n")


def test_group_cpu_time(tmp_path: Path) -> None:
    """A router with child processes is measured with all of them, and with no other process."""
    write(tmp_path, 10, 10, used=500, kb=4)
    write(tmp_path, 11, 10, used=30, kb=2)
    write(tmp_path, 12, 12, used=7, kb=1)
    (tmp_path / "meminfo").touch()

    assert 530 == group_cpu_ns(10, tmp_path)
    assert 6 * 1024 == resident_bytes(10, tmp_path)


def test_median_of_runs() -> None:
    """The median of each figure; stalls are added up, so that no run hides one."""
    runs = [a_run(cpu_us_per_request=cost, stalls=stalls) for cost, stalls in ((3, 0), (1, 2), (2, 0))]

    assert (2, 2) == (Run.median(runs).cpu_us_per_request, Run.median(runs).stalls)


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        (59.0, [True, True, False]),
        (61.0, [False, True, False]),
        (71.0, [False, False, False]),
        (30.0, [True] * 3),
    ],
)
def test_targets(ours: float, met: list[bool]) -> None:
    """The limits are 0.6 of sglang-router, vllm-router itself, and 0.3 of sglang-router."""
    rows = targets.targets(results(ours=ours, vllm=70.0, sglang=100.0))

    assert met == [row.is_met for row in rows]
    assert ours / 100 == rows[0].ratio
    assert rows[0].as_json().items() >= {"met": met[0], "theirs": 100.0, "ours": ours}.items()


def test_missing_peer() -> None:
    """Without the peer a target is neither met nor missed, and the table shows that."""
    rows = targets.targets(results(ours=10.0, vllm=70.0))
    console = Console(width=120, record=True, file=io.StringIO())

    console.print(targets.target_table(rows))

    assert [None, True, None] == [row.is_met for row in rows]
    text = console.export_text()
    assert 2 == text.count("missing")
    assert 2 == text.count("unknown")


def test_added_latency() -> None:
    """The limits are nginx's latency plus 0.1 ms (median) and 0.3 ms (p99), and no stall."""
    medians = {
        ("alone", targets.OURS): a_run(latency_p50_ms=0.25, latency_p99_ms=0.45),
        ("alone", targets.NGINX): a_run(latency_p50_ms=0.1, latency_p99_ms=0.2),
        ("paced", targets.OURS): a_run(stalls=1),
    }

    met = {row.figure: row.is_met for row in targets.targets(Results(1, medians))}

    assert (False, True, False) == (met["latency_p50_ms"], met["latency_p99_ms"], met["stalls"])


async def test_ratio_to_another_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU is compared round by round: a round in which the machine is slow moves no quartile."""
    cpu_us = {"a": iter([11.0, 110.0, 12.0]), rounds.other("a"): iter([10.0, 100.0, 10.0])}

    async def measure(_work: Work, contender: Contender, _directory: Path) -> Run:
        return a_run(cpu_us_per_request=next(cpu_us[contender.name]), cpu_us_per_event=0.0)

    monkeypatch.setattr(rounds, "measure", measure)
    contenders = [Contender(name, 0, 0) for name in cpu_us]
    works = standard_works()[:1]

    shown = await run_rounds(contenders, lambda: works, 3, tmp_path)

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tables.work_table(works[0], tables.names(shown), shown))
    assert "1.100 (1.100 to 1.150)" in console.export_text()
    (first, second) = tables.as_json(shown)
    assert pytest.approx({"lower": 1.1, "median": 1.1, "upper": 1.15}) == first["cpu_to_other"]
    assert "cpu_to_other" not in second


def test_missing_program(tmp_path: Path) -> None:
    """A program that a flag names must exist."""
    with pytest.raises(FleetError, match="no such program"):
        find_nginx(tmp_path / "nginx")


def test_half_installed(tmp_path: Path) -> None:
    """A peer counts as installed after a complete installation of the wanted version."""
    peer = installs.Peer("some-router", ["some-router==1.2"], program="some-router")
    peer.directory(tmp_path).mkdir()
    assert peer.find(tmp_path) is None

    (peer.directory(tmp_path) / "installed-some-router==1.1").touch()
    assert peer.find(tmp_path) is None

    (peer.directory(tmp_path) / "installed-some-router==1.2").touch()
    assert tmp_path / "some-router" / "bin" / "some-router" == peer.find(tmp_path)
    assert "1.2" == peer.version


@pytest.mark.usefixtures("quick")
def test_relay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A small real run: every work in both modes and without a router."""
    out = tmp_path / "relay.json"

    status = main(["relay", "--runs", "1", "--share", "0.002", "--json", str(out)])

    assert 0 == status, capfd.readouterr().err
    body: dict[str, Any] = json.loads(out.read_text())
    measured = {(row["work"], row["name"]) for row in body["results"]}
    names = (targets.OURS, targets.OURS_KV, *targets.PAIRS, targets.DIRECT)
    works = ("short", "after GET", "long", "paced", "alone")
    assert {(work, name) for work in works for name in names} == measured
    assert "tools: short" in capfd.readouterr().out


def test_request(tmp_path: Path) -> None:
    """The request bench serves real requests through fake sockets, also by pairs, and shows a profile."""
    out = tmp_path / "request.json"
    few = ["request", "--runs", "1", "--requests", "20", "--profile", "--json", str(out)]
    program = (
        "from scripts.kit.bench import __main__, request\n"
        f"request.WARM_REQUESTS = 10\nraise SystemExit(__main__.main({few}))"
    )
    bench = [sys.executable, "-c", program]  # it sets up logs
    done = subprocess.run(bench, capture_output=True, text=True, timeout=100, check=False)

    assert 0 == done.returncode, done.stderr
    rows = json.loads(out.read_text())["us"]
    assert {targets.OURS, targets.OURS_KV, targets.OURS_PAIR} == rows.keys()
    for row in rows.values():
        request, _, _ = (row.pop(name) for name in ("request", "stream of 2", "event"))
        assert all(row.pop(api) > 0 for api in ("chat/completions", "messages", "responses"))
        assert 0 < row["frontend"] < request
        assert request == pytest.approx(sum(row.values()))
    assert "completions.py" in done.stdout


def test_shares() -> None:
    """Time in other code belongs to its callers in kvrouter; without such a caller it is `other`."""
    profile, ours, loop = pstats.Stats(), (router.__file__, 1, "route"), (__file__, 1, "run")
    profile.stats = {  # type: ignore[attr-defined]
        ours: (1, 1, 3.0, 5.0, {loop: (1, 1, 3.0, 5.0)}),
        ("~", 0, "len"): (2, 2, 4.0, 4.0, {ours: (1, 1, 2.0, 2.0), loop: (1, 1, 2.0, 2.0)}),
        loop: (1, 1, 1.0, 8.0, {}),
    }

    assert {"core": 5 / 8, "other": 3 / 8} == shares(profile)


@pytest.mark.usefixtures("quick")
def test_peers_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each missing peer is named with its install command; in the long form kvrouter's chats are measured.

    `test_relay` runs the other works.
    """

    async def side_by_side(*_: object) -> Results:
        return Results(1, {(work.name, targets.OURS): a_run() for work in standard_works()})

    monkeypatch.setattr(peers, "_side_by_side", side_by_side)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("scripts.kit.bench.wire.routers.find_nginx", lambda named: named)
    out = tmp_path / "peers.json"

    status = main(
        ["peers", "--runs", "1", "--chat-runs", str(int(IS_LONG)), "--share", "0.002", "--json", str(out)]
    )

    output = capfd.readouterr()
    assert 0 == status, output.err
    body = json.loads(out.read_text())
    assert 4 == len(body["missing"])
    for name in (
        "nginx (apt-get",
        "vllm-router (--install)",
        "sglang-router (--install)",
        "Dynamo (--install)",
    ):
        assert f"missing: {name}" in output.out
    works = {"short", "long", "paced", "alone", *["chat"] * IS_LONG}
    assert works == {row["work"] for row in body["targets"]}
    assert {None} == {row["met"] for row in body["targets"] if row["figure"] != "stalls"}


@pytest.mark.skipif(find_nginx(None) is None, reason="no nginx on PATH: apt-get install nginx-light")
async def test_nginx() -> None:
    """Nginx with this configuration relays short requests and streams."""
    works = [replace(work, requests=8, concurrency=4, ramp_ms=0) for work in standard_works()]
    async with open_stage() as stage:
        workers = await stage.workers(pace_ms=1)
        nginx = await stage.nginx(workers, find_nginx(None) or Path())
        runs = [await measure(work, nginx, stage.directory) for work in works]

    assert all(run.cpu_us_per_request > 0 for run in runs)


async def test_another_checkout_is_what_runs(tmp_path: Path) -> None:
    """The frontend of --against is the other checkout's, in any working directory."""
    package = tmp_path / "kvrouter" / "frontend"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "__main__.py").write_text("raise SystemExit('the other one')")
    client = Client()

    async with Fleet(tmp_path) as fleet:
        with pytest.raises(FleetError, match="the other one"):
            await start_kvrouter(fleet, client, "other", [], count=1, checkout=tmp_path)
    await client.close()


def test_another_checkout_has_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--against must name the root of a checkout."""
    with pytest.raises(SystemExit):
        main(["relay", "--against", str(tmp_path)])

    assert "not a checkout of kvrouter" in capsys.readouterr().err
