"""The arithmetic of `scripts/bench sync` (the measuring needs a fleet), and `scripts/bench tokens`."""

from __future__ import annotations

import io
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit.bench.__main__ import main
from scripts.kit.bench.herding import measure
from scripts.kit.bench.meter import Usage, cpu_ns, usage
from scripts.kit.bench.newcomer import FAST, Story, table_of, true_tokens_per_s
from scripts.kit.bench.newcomer import measure as run_story
from scripts.kit.bench.sync import make_requests
from scripts.kit.bench.sync_report import Visibility, median_cost, summary, tables
from scripts.kit.bench.tokens import Bench, measure_all
from scripts.kit.bench.visibility import Seen
from scripts.kit.http_client import Client

METRICS = """\
# HELP kvrouter_bus_published_total Messages sent
kvrouter_bus_published_total 3.0
kvrouter_bus_published_bytes_total 630.0
kvrouter_bus_received_total 1e+01
kvrouter_bus_received_bytes_total 4000.0
kvrouter_bookings{pool="p",router="r"} 1.0
"""


def test_cpu_time(tmp_path: Path) -> None:
    """cpu_ns sums the nanoseconds of all threads of a process."""
    for thread, used in ((7, 1500), (8, 20)):
        task = tmp_path / "7" / "task" / str(thread)
        task.mkdir(parents=True)
        (task / "schedstat").write_text(f"{used} 99 3\n")

    assert 1520 == cpu_ns(7, tmp_path)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A replica's /metrics."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_usage(url: str) -> None:
    """Usage has CPU time from /proc and the bus counters; the difference of two is an interval."""
    client = Client()
    used = await usage(client, os.getpid(), url)
    client.close()

    assert used.cpu_ns > 0
    assert (3, 630, 10, 4000) == (used.sent, used.sent_bytes, used.received, used.received_bytes)
    assert Usage(0, 0, 0, 0, 0) == used - used
    assert Usage(5, 1, 2, 3, 4) == Usage(6, 2, 4, 6, 8) - Usage(1, 1, 2, 3, 4)


def run(requests: int, *cpu_us: float) -> tuple[int, list[Usage]]:
    """One run in which each replica used this much per request, and received 100 bytes."""
    return requests, [Usage(round(us * 1000 * requests), received_bytes=100 * requests) for us in cpu_us]


def test_one_serves() -> None:
    """The first replica serves, the others are peers; each figure is the median of the runs."""
    runs = [run(10, 1000, 100, 300), run(20, 1200, 200, 200), run(10, 5000, 900, 900)]
    cost = median_cost(runs, replicas=3, spread=False, synced=True)

    assert cost.peer is not None
    assert (1200.0, 200.0) == (cost.serving.cpu_us, cost.peer.cpu_us)
    assert (10, 100.0) == (cost.requests, cost.peer.received_bytes)


def test_all_serve() -> None:
    """If spread, the figure is the mean over all replicas, and there are no peers."""
    cost = median_cost([run(10, 100, 300)], replicas=2, spread=True, synced=True)

    assert (200.0, None) == (cost.serving.cpu_us, cost.peer)


def test_visibility() -> None:
    """Percentiles of each run, then their medians; the rate is the one achieved at a peer."""
    runs = [Seen([float(ms) for ms in range(1, 101)], cpu) for cpu in (30.0, 10.0, 20.0)]
    seen = Visibility.median(3, 5.0, runs)

    assert (50.0, 90.0, 99.0, 20.0) == (seen.p50_ms, seen.p90_ms, seen.p99_ms, seen.cpu_us)
    assert (100, 10.0) == (seen.samples, seen.rate)


def test_report() -> None:
    """All figures are in the tables and in the file."""
    costs = [
        median_cost([run(10, 1234, 321)], replicas=2, spread=False, synced=synced) for synced in (True, False)
    ]
    seen = [Visibility(2, 60.0, 240, 0.5, 0.75, 1.25, 150.0)]
    console = Console(file=io.StringIO(), width=200)
    for table in tables(costs, seen):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()

    assert all(figure in text for figure in ("1,234", "321", "0.50 ms", "1.25 ms", "150"))
    assert [True, False] == [cost["synced"] for cost in summary(costs, seen)["costs"]]


def test_requests_share_nothing() -> None:
    """Prompts share no prefix, and requests ask for a stream, so that the end of prefill is published."""
    requests = make_requests()

    assert len(requests) == len({request.body[:400] for request in requests})
    assert b'"stream":true' in requests[0].body


# --- newcomer ---


def test_newcomer_row() -> None:
    """The speed that was learnt is that of the engines, and the new one is used."""
    story = Story("small", FAST, 80, 130, chats=30, grows_at_s=10, comes_at_s=14, turns_s=24)

    seen = run_story(story, 0)

    assert seen.tokens_per_s == pytest.approx(true_tokens_per_s(FAST), rel=0.1)
    assert seen.until_first_s < 10
    assert 0 < seen.share < 1
    assert 0 < seen.p50_s <= seen.p90_s <= seen.p99_s
    assert 1 == table_of([story], 1).row_count


# --- herding ---


def test_herding_row() -> None:
    """Runs repeat exactly: eight replicas herd on the idle worker until they learn, one replica does not."""
    row = measure(replicas=8, burst=8, runs=3)

    assert row == measure(replicas=8, burst=8, runs=3)
    assert (8.0, 8.0) == (row.ties.to_idle, row.ties.fullest)
    assert row.ideal.to_idle <= row.learnt.to_idle < 4
    assert row.ideal.fullest <= row.learnt.fullest < 6
    assert row.ideal == measure(replicas=1, burst=8, runs=3).learnt


def test_herding_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table and file have the same figures."""
    file = tmp_path / "herding.json"
    flags = ["--replicas", "2", "--burst", "8", "--runs", "1", "--json", str(file)]

    assert 0 == main(["herding", *flags])
    assert "idle" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    assert (2, 8) == (row["replicas"], row["burst"])
    assert row["ties"]["to_idle"] > row["ideal"]["to_idle"]


def test_herding_refuses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """0 replicas is an error."""
    with pytest.raises(SystemExit, match="2"):
        main(["herding", "--replicas", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a sub-command the list is printed; an unknown one is an error."""
    assert 0 == main([])
    said = capsys.readouterr().out
    assert "sync " in said
    assert "policies " in said
    assert 2 == main(["nothing"])
    assert "no sub-command 'nothing'" in capsys.readouterr().err


def test_tokens(tmp_path: Path) -> None:
    """Prompts have the requested length, their known part costs little, and the ids are compared."""
    build_tiny_model(tmp_path)
    bench = Bench(tmp_path)
    results = list(measure_all(bench, runs=2))

    assert 3 == len(results)
    assert all(8500 < result.tokens < 9500 and 7500 < result.known_tokens for result in results)
    assert all(0 < result.ratio < 1 for result in results)


def test_tokens_that_cannot_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose tokenizer has no cache is an error with the reason."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.save(str(tmp_path / "tokenizer.json"))

    assert 1 == main(["tokens", "--model-path", str(tmp_path)])
    assert "prepend_scheme" in capsys.readouterr().err
