"""`scripts/bench`: a short run of each command that needs no fleet, and the arithmetic of those that do."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer, models, pre_tokenizers

from kvrouter.core.native import versions
from kvrouter.core.tables.table import FlatTable
from kvrouter.lab.simulate import workloads
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from scripts.kit.bench import churn, decisions, instructions, tokens
from scripts.kit.bench.__main__ import COMMANDS, main
from scripts.kit.bench.meter import Usage, cpu_ns, usage
from scripts.kit.bench.overload import Seen as Overload
from scripts.kit.bench.sync import Cost, Visibility, make_requests, tables
from scripts.kit.bench.visibility import Seen
from scripts.kit.http_client import Client
from scripts.kit.load import Outcome

METRICS = """\
# HELP kvrouter_bus_messages_total Messages
kvrouter_bus_messages_total{event="published"} 3.0
kvrouter_bus_messages_total{event="received"} 1e+01
kvrouter_bus_bytes_total{event="published"} 630.0
kvrouter_bus_bytes_total{event="received"} 4000.0
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
    await client.close()

    assert used.cpu_ns > 0
    assert (3, 630, 10, 4000) == (used.sent, used.sent_bytes, used.received, used.received_bytes)
    assert Usage(0, 0, 0, 0, 0) == used - used
    assert Usage(5, 1, 2, 3, 4) == Usage(6, 2, 4, 6, 8) - Usage(1, 1, 2, 3, 4)


def run(requests: int, *cpu_us: float) -> tuple[int, list[Usage]]:
    """One run in which each replica used this much per request, and received 100 bytes."""
    return requests, [Usage(round(us * 1000 * requests), received_bytes=100 * requests) for us in cpu_us]


def test_sync_costs() -> None:
    """The first replica serves, the others are peers; each figure is the median of the runs."""
    runs = [run(10, 1000, 100, 300), run(20, 1200, 200, 200), run(10, 5000, 900, 900)]
    one = Cost.of(runs, replicas=3, spread=False, synced=True)
    every = Cost.of([run(10, 100, 300)], replicas=2, spread=True, synced=True)

    assert one.peer is not None
    assert (1_200_000, 200_000) == (one.serving.cpu_ns, one.peer.cpu_ns)
    assert (200_000, None) == (every.serving.cpu_ns, every.peer)
    assert [2 + 1, 0] == [table.row_count for table in tables([one, every], [])]


def test_visibility() -> None:
    """Percentiles of each run, then their medians; the rate is the one achieved at a peer."""
    runs = [Seen([float(ms) for ms in range(1, 101)], cpu) for cpu in (30.0, 10.0, 20.0)]
    seen = Visibility.median(3, 5.0, runs)

    assert (50.0, 90.0, 99.0, 20.0) == (seen.p50_ms, seen.p90_ms, seen.p99_ms, seen.cpu_us)
    assert (100, 10.0) == (seen.samples, seen.rate)


def test_requests_share_nothing() -> None:
    """Prompts share no prefix, and requests ask for a stream, so that the end of prefill is published."""
    requests = make_requests()

    assert len(requests) == len({request.body[:400] for request in requests})
    assert b'"stream":true' in requests[0].body


def test_goodput() -> None:
    """Complete answers count; the others are counted by status."""
    good, refused = Outcome(0, "", None, 200, latency_s=1.0), Outcome(1, "", "status 503: {}", 503)
    seen = Overload([good, good, refused], 2.0)

    assert (1.0, ["x", "1.0", "1.00, 1.00", "1 x 503"]) == (seen.goodput, seen.row("x"))


# --- a short run ---


def _once(act: Callable[[], object], **_: float) -> float:
    act()
    return 1.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small measurements, as figures are not tested; the version in use is restored."""
    before = versions.in_use()
    for module in ("scripts.kit.bench.hashes", "scripts.kit.bench.index"):
        monkeypatch.setattr(f"{module}.microseconds", _once)
    monkeypatch.setattr(churn, "MOST_ROWS", 3000)
    monkeypatch.setattr(churn, "PHASE_OPERATIONS", 5000)
    cell = Cell(workloads.trace(read_trace(CONVERSATION_EXCERPT, 100)), 0.5, load=0.6, workers=2)
    group = decisions.Group("a few requests", ("kv:8", "round-robin"), [cell])
    monkeypatch.setattr(decisions, "groups", lambda: {"small": group})
    monkeypatch.setattr(tokens, "MOST", 1.0)
    yield
    versions.choose(before)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("command", "figures"),
    [
        ("policies --targets 2 --runs 1 --seconds 0.001", "figures"),
        ("decisions --seeds 1 --jobs 1", "groups"),
        ("hashes --tokens 64", "us"),
        ("index --targets 2 --blocks 200", "resident"),
        ("tokens --runs 1", "results"),
    ],
)
def test_runs(command: str, figures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, and a file with the same figures and the machine."""
    file = tmp_path / "figures.json"

    assert 0 == main([*command.split(), "--json", str(file)])

    written = json.loads(file.read_text())
    assert written[figures]
    assert {"date", "cpu", "kvrouter"} <= written.keys()
    assert capsys.readouterr().out


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("core", versions.CORES)
def test_churn(core: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The requested number of operations runs, of every kind, with both versions."""
    if core == versions.NATIVE and versions.why_not_built:
        pytest.skip(versions.why_not_built)

    assert 0 == main(["churn", "--operations", "20000", "--core", core])

    said = capsys.readouterr().out
    assert all(word in said for word in (f"core {core}", "looked up", "removed", "stored", "checks", "rows"))


class Forgetful(FlatTable):
    """A table that does not sweep one of its shards."""

    def sweep(self, slots: Sequence[int], shard_number: int) -> None:
        if shard_number != 5:
            super().sweep(slots, shard_number)


@pytest.mark.usefixtures("short")
def test_wrong_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks too many make the history fail."""
    monkeypatch.setattr(churn, "new_table", Forgetful)

    with pytest.raises(AssertionError):
        main(["churn", "--operations", "200000", "--core", "python"])


def test_tokens_that_cannot_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose tokenizer has no cache is an error with the reason."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.save(str(tmp_path / "tokenizer.json"))

    assert 1 == main(["tokens", "--model-path", str(tmp_path)])
    assert "prepend_scheme" in capsys.readouterr().err


def test_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile's last line has its sum, without idle time; without valgrind it is an error."""
    assert 63395 == instructions.total("summary: 12\n\nfn=(1)\n15 63395\n\ntotals: 63395\n")
    one = instructions.cost(100, 50_000, 1_000.0)
    assert (490.0, 10.0) == (one.instructions, one.idle)
    assert 1 == instructions.table({"kv": {"short": one}}, {"kv": {"short": one}}).row_count
    monkeypatch.setenv("PATH", str(tmp_path))

    assert 1 == main(["instructions", "--share", "0.001"])

    assert "valgrind is not on PATH: install valgrind" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command is there, says what it measures, and can write a file."""
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])

    assert "--json FILE" in capsys.readouterr().out


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a sub-command the list is printed; an unknown one is an error."""
    assert 0 == main([])
    said = capsys.readouterr().out
    assert all(f"  {command} " in said for command in COMMANDS)
    assert 2 == main(["nothing"])
    assert "no sub-command 'nothing'" in capsys.readouterr().err
