"""Figures, agreement of replicas, and the verdict."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrouter.lab.simulate.percentiles import Percentiles, percentiles
from kvrouter.lab.simulate.report import Possible
from scripts.kit.demo import main
from scripts.kit.figures import MachineTime, figures
from scripts.kit.load import Outcome
from scripts.kit.replicas import View, _view, disagreements
from scripts.kit.report import ModeResult, problems, show, write_html, write_json
from scripts.kit.script import new_console
from scripts.kit.workload import Chats, load_requests

GOOD_VIEW = View("r0", ("r1",), 4, {"w1/0": (10, "ab"), "w2/0": (7, "cd")}, {}, 0, 0, 0, 1000, 300)


def outcome(number: int, cached_tokens: int = 0, **more: Any) -> Outcome:
    """A successful outcome."""
    good = {"error": None, "status": 200, "ttft_s": 0.1, "latency_s": 0.2, "worker": "w1"}
    return Outcome(number, "u", prompt_tokens=100, cached_tokens=cached_tokens, **{**good, **more})


def result(mode: str, cached_tokens: int, *, views: list[View] | None = None, **more: Any) -> ModeResult:
    """A mode's result of ten requests."""
    outcomes = [outcome(number, cached_tokens) for number in range(9)] + [outcome(9, cached_tokens, **more)]
    failed = [one for one in outcomes if one.error]
    return ModeResult(mode, figures(outcomes), views or [GOOD_VIEW, GOOD_VIEW], 0.5, failed)


# --- figures ---


def test_percentiles() -> None:
    """Percentiles are values that occurred (nearest rank)."""
    assert Percentiles(50, 90, 99) == percentiles(range(100, 0, -1))
    assert Percentiles(7, 7, 7) == percentiles([None, 7])
    assert math.isnan(percentiles([]).p50)


def test_figures() -> None:
    """Failures count as errors, and in no other figure."""
    bad = replace(outcome(2), error="gone", worker="w9", late_s=0.5)
    sums = figures([outcome(0, 40), outcome(1, 20, worker="w0"), bad])

    assert (3, 1, 200, 60, 0.3) == (
        sums.requests, sums.errors, sums.prompt_tokens, sums.cached_tokens, sums.cached_token_rate
    )  # fmt: skip
    assert {"w0": 1, "w1": 1} == sums.requests_per_worker
    assert 0.5 == sums.worst_late_s


def test_nothing_succeeded() -> None:
    """The cache rate without prompts is 0."""
    assert 0.0 == figures([]).cached_token_rate


def test_machine_time() -> None:
    """The CPU load is a share of the time in between."""
    assert 0.25 == MachineTime(busy=150, total=1200).busy_since(MachineTime(busy=100, total=1000))


# --- replicas ---


def test_view_of_workers() -> None:
    """A view has the compared part of /workers."""
    target = {
        "worker_id": "w1", "rank": 0, "eligible": True, "events": "live", "blocks": 10, "digest": "ab",
        "requests_in_flight": 1, "active_blocks": 5, "charged_prefill_tokens": 80,
    }  # fmt: skip
    body = {
        "router_id": "r0",
        "namespace_peers": ["r1"],
        "targets": [target, {**target, "worker_id": "w2", "events": "recovering"}],
        "pools": [{"cached": {"prompt_tokens": 0}}, {"cached": {"prompt_tokens": 90, "best": 0.5}}],
        "bookings": [{"pool": "p", "owners": {"r0": {"count": 2}, "r1": {"count": 0}}}],
    }
    index = {"w1/0": (10, "ab"), "w2/0": (10, "ab")}

    assert View("r0", ("r1",), 1, index, {"r0": 2}, 2, 10, 160, 90, 45) == _view(body)


def test_agreement() -> None:
    """Idle and equal replicas agree, for any order of targets."""
    turned = replace(GOOD_VIEW, router_id="r1", index=dict(reversed(GOOD_VIEW.index.items())))

    assert [] == disagreements([GOOD_VIEW, turned])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bookings": {"r1": 2}}, "replica 1 still has 2 bookings"),
        ({"in_flight": 1}, "1 request in flight"),
        ({"active_blocks": 3}, "3 active blocks"),
        ({"charged_prefill_tokens": 9}, "9 charged prefill tokens"),
        ({"index": {"w1/0": (10, "ab"), "w2/0": (7, "other")}}, "different blocks of w2/0"),
        ({"index": {"w1/0": (10, "ab")}}, "different blocks of w2/0"),
    ],
)
def test_disagreement(change: dict[str, Any], says: str) -> None:
    """Each kind of disagreement is named."""
    (problem,) = disagreements([GOOD_VIEW, replace(GOOD_VIEW, **change)])

    assert says in problem


# --- verdict ---


def printed(*results: ModeResult) -> str:
    """The printed report."""
    text = io.StringIO()
    show(Console(file=text, width=300), results, Possible(0.9, 0.85))
    return text.getvalue()


def test_passed() -> None:
    """A successful run prints one table and a verdict."""
    plain, least, kv = result("round-robin", 10), result("least-loaded", 8), result("kv", 20)
    text = printed(plain, least, kv)

    assert [] == problems([plain, least, kv])
    assert all(part in text for part in ("10.0%", "8.0%", "20.0%", "+150%", "0/0", "equal", "50%"))
    bounds = "(best engines 30.0%, one pooled cache 85.0%)"
    assert f"cached: kv 20.0% of 90.0% possible {bounds}; round-robin 10.0%; least-loaded 8.0%" in text
    said = (
        "nine of ten first tokens within these times with kv and with round-robin, the better of the others"
    )
    assert f"passed: {said}; replicas agree, no bookings left" in text
    assert "first tokens not faster: 100 ms instead of 100 ms" in text
    assert "failed" not in text
    assert "warning" not in text


def test_eighty_columns() -> None:
    """With the figures of a large, slow run nothing is cut off, and one sentence has the gain."""
    modes = {"round-robin": 12.5, "least-loaded": 13.25, "kv": 10.0}
    results = [result(mode, 10 + n) for n, mode in enumerate(modes)]
    slow = [
        replace(
            one,
            figures=replace(
                one.figures,
                requests=2000,
                ttft_s=Percentiles(*3 * [modes[one.mode]]),
                latency_s=Percentiles(*3 * [36.3]),
                requests_per_worker={"w1": 480, "w2": 1521},
            ),
        )
        for one in results
    ]
    text = io.StringIO()
    show(Console(file=text, width=80), slow, Possible(0.9, 0.85))

    assert "…" not in text.getvalue()
    assert all(part in text.getvalue() for part in ("36,300 ms", "480–1521", "−25%"))
    assert "first tokens 1.2 times faster: 10,000 ms instead of 12,500 ms" in text.getvalue()


@pytest.mark.parametrize(
    ("plain", "kv", "says"),
    [
        (result("rr", 20), result("kv", 20), "kv found 20.0% of the prompt tokens in cache, not more"),
        (result("rr", 1), result("kv", 2, error="gone"), "kv: 1 of 10 requests failed; the first is"),
        (result("rr", 1, error="gone"), result("kv", 2), "rr: 1 of 10 requests failed"),
        (
            result("rr", 1, views=[GOOD_VIEW, replace(GOOD_VIEW, in_flight=1)]),
            result("kv", 2),
            "rr: replica 1 still has",
        ),
    ],
)  # fmt: skip
def test_failed(plain: ModeResult, kv: ModeResult, says: str) -> None:
    """A failed run prints its failures instead of a verdict."""
    text = printed(plain, kv)

    assert f"failed: {says}" in text
    assert "passed" not in text


def test_nothing_succeeded_at_all() -> None:
    """The table is printed also without figures."""
    dead = ModeResult("rr", figures([Outcome(0, "u")]), [GOOD_VIEW], None, [Outcome(0, "u")])

    assert "unknown" in printed(dead, dead)


def test_warnings() -> None:
    """A busy machine or a starved generator is a warning, not a failure."""
    plain = replace(result("rr", 1), machine_busy=0.81)
    kv = result("kv", 2, late_s=0.3)
    text = printed(plain, kv)

    assert "warning: rr: the machine was 81% busy" in text
    assert "warning: kv: a request left 300 ms after its time" in text
    assert "passed" in text


def test_json(tmp_path: Path) -> None:
    """The JSON has the same figures."""
    file = tmp_path / "figures.json"
    write_json(file, [result("rr", 10), result("kv", 20)], {"scaling": {"tokens_per_id": 64}})
    written = json.loads(file.read_text())

    assert (True, []) == (written["passed"], written["problems"])
    assert [("rr", 0.1), ("kv", 0.2)] == [
        (mode["mode"], mode["cached_token_rate"]) for mode in written["modes"]
    ]
    assert 64 == written["scaling"]["tokens_per_id"]


# --- the demo's own requests ---


def test_demo_requests() -> None:
    """Chats, equal each time they are made: each turn sends the whole chat so far."""
    requests = Chats(200, 10.0).drawn()
    prompts = [json.loads(one.body)["prompt"] for one in requests]
    body = json.loads(requests[0].body)

    assert requests == Chats(200, 10.0).drawn()
    assert sorted(one.at_s for one in requests) == [one.at_s for one in requests]
    assert all(0 <= one.at_s <= 10.0 for one in requests)
    assert (True, {"include_usage": True}) == (body["stream"], body["stream_options"])
    assert body["max_tokens"] == requests[0].output_tokens
    documents = {tuple(prompt[:1000]) for prompt in prompts}
    assert 10 < len(documents) <= 32
    later = [one for one in prompts if any(len(o) < len(one) and one[: len(o)] == o for o in prompts)]
    assert len(later) > 80, "turns go on from turns"


def test_trace_requests() -> None:
    """Requests of chaos and benchmarks: 640 in 35 s, equal each time they are made."""
    requests = load_requests(640)

    assert requests == load_requests(640)
    assert (640, 62, 844) == (
        len(requests), requests[0].output_tokens, len(json.loads(requests[0].body)["prompt"])
    )  # fmt: skip
    assert pytest.approx(35.0) == requests[-1].at_s
    assert all(one.at_s <= other.at_s for one, other in pairwise(requests))
    assert [922, 1674, 899, 429] == json.loads(requests[0].body)["prompt"][:4], "figures stay comparable"


def test_html(tmp_path: Path) -> None:
    """One file with the figures and two plots."""
    file = tmp_path / "demo.html"
    results = [replace(result(mode, 10 + n), ttft_s=[0.1, 0.2]) for n, mode in enumerate(["rr", "kv"])]
    write_html(file, results, Possible(0.9, 0.85), "about <it>")
    text = file.read_text()

    assert "about &lt;it&gt;" in text
    assert text.count("Plotly.newPlot(") >= 2
    assert "one endless cache" in text


def test_demo_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """A number that it cannot serve is an error."""
    with pytest.raises(SystemExit):
        main(["--requests", "1"])

    assert "--requests 1: use 2 to 2000" in capsys.readouterr().err


# --- where it is shown ---


def test_tables_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal lines are wide, so that the table's words are not wrapped."""
    monkeypatch.delenv("COLUMNS", raising=False)
    new_console().print(" ".join(["word"] * 40))
    monkeypatch.setenv("COLUMNS", "100")
    new_console().print(" ".join(["word"] * 40))

    wide, narrow = (len(line) for line in capsys.readouterr().out.splitlines()[:2])
    assert narrow <= 100 < wide
