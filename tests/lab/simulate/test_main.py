"""`python -m kvrouter.lab.simulate`, over the excerpt of the conversation trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.lab.simulate.__main__ import main
from kvrouter.lab.simulate.traces import TraceRequest, named_blocks

SMALL = ["--requests", "150", "--workers", "4", "--load", "0.7"]
CUSTOM = """
from kvrouter import Policy

class First(Policy):
    def choose(self, request, candidates):
        return min(candidates, key=lambda one: one.target.worker_id)
"""


def simulated(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    """The cells."""
    file = tmp_path / "figures.json"
    assert 0 == main([*SMALL, "--json", str(file), *flags])
    cells: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    return cells


def test_modes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mode kv finds more in caches than round-robin, and less than could be; table and file agree."""
    (cell,) = simulated(tmp_path, "--requests", "400")

    assert ["oracle", "round-robin", "kv"] == list(cell["modes"])
    plain, kv = cell["modes"]["round-robin"]["mean"], cell["modes"]["kv"]["mean"]
    assert kv["cached"] > 1.2 * plain["cached"] > 0
    assert plain["cached"] < kv["pooled"] <= kv["achievable"]
    assert kv["cached"] <= kv["held"] <= kv["achievable"]
    assert plain["cached"] < 0.9 * plain["held"], "blocks are elsewhere"
    rates = kv["cached"], kv["achievable"], kv["held"], kv["pooled"]
    kv_part = "cached: kv {:.1%} of {:.1%} possible (best engines {:.1%}, one pooled cache {:.1%});".format(
        *rates
    )
    printed = capsys.readouterr().out
    assert kv_part in printed
    assert f"round-robin {plain['cached']:.1%}" in printed


def test_custom_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom class runs after the modes; here one of four workers gets all."""
    (tmp_path / "first_only.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)

    (cell,) = simulated(tmp_path, "--router-mode", "random", "--router-policy", "first_only:First")

    assert ["oracle", "random", "own"] == list(cell["modes"])
    assert 4.0 == cell["modes"]["own"]["mean"]["busiest"]


def test_engines_as_a_user_has_them(tmp_path: Path) -> None:
    """The cache in tokens, and the batch; more of either is not slower."""
    flags = ["--workers", "2", "--router-mode", "round-robin"]
    small, large = (simulated(tmp_path, *flags, f"--kv-tokens={size}")[0] for size in (200_000, 800_000))
    narrow = simulated(tmp_path, *flags, "--kv-tokens=800000", "--max-num-seqs=4")[0]

    assert (200_000 // 512, 800_000 // 512) == (small["capacity_blocks"], large["capacity_blocks"])
    assert (64, 4) == (large["model"]["max_num_seqs"], narrow["model"]["max_num_seqs"])
    p90 = [one["modes"]["round-robin"]["mean"]["ttft_p90_s"] for one in (large, small)]
    assert p90[0] <= p90[1]


def test_prefill_and_decode_apart(tmp_path: Path) -> None:
    """Each mode once with whole engines, and once with each rule."""
    flags = ["--prefill-workers", "2", "--decode-workers", "2", "--pd-rule", "auto", "--pd-rule", "always"]
    (cell,) = simulated(tmp_path, *flags, "--transfer-gbps", "100")

    handed = {mode: row["mean"]["handed"] for mode, row in cell["modes"].items()}
    assert ["oracle", "kv", "kv@auto", "kv@always"] == list(handed)
    assert (0.0, 0.0, 1.0) == (handed["oracle"], handed["kv"], handed["kv@always"])
    assert 0.0 < handed["kv@auto"] < 1.0
    assert {"prefill": 2, "decode": 2, "gbps": 100.0, "kv_bytes": 131_072} == cell["roles"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill-workers", "2"], "give --prefill-workers and --decode-workers together"),
        (["--prefill-workers", "4", "--decode-workers", "4"], "8, more than --workers 4"),
        (["--prefill-workers", "1", "--decode-workers", "1", "--cancel", "0.1"], "are for whole engines"),
        (["--pd-rule", "auto"], "--pd-rule needs --prefill-workers"),
        (["--trace", "nowhere.jsonl"], "cannot read the trace nowhere.jsonl"),
        (["--router-policy", "nowhere:Class"], "nowhere"),
        (["--router-mode", "kw:8"], "--router-mode 'kw:8': must be one of kv, kv-score, "),
        (["--load", "0.5", "--pace", "2"], "use one of them"),
        (["--kv-tokens", "9", "--cache", "2"], "use one of them"),
        (["--fail", "w5@3"], "--fail: there is no w5, with --workers 4"),
        (["--json", "/nowhere/f.json"], "--json /nowhere/f.json: No such file"),
        (["--timing", "mocker"], "removed; use h100"),
        (["--num-blocks", "9"], "use --kv-tokens"),
        (["--duration", "9"], "use --pace"),
    ],
)
def test_rejected_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a wrong command line states what to change; nothing is printed."""
    assert 2 == main([*SMALL, *flags])

    printed = capsys.readouterr()
    assert message in printed.err
    assert "" == printed.out


def test_qwen_bailian_trace(tmp_path: Path) -> None:
    """Of its ids of 16 tokens, 32 are taken as one block."""
    rows = [
        {"chat_id": n, "timestamp": 60.5 + n, "input_length": 1040, "output_length": 4, "hash_ids": ids}
        for n, ids in enumerate([[*range(64), 1000 + n] for n in range(10)])
    ]
    trace = tmp_path / "qwen.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

    (cell,) = simulated(tmp_path, "--trace", str(trace), "--router-mode", "kv", "--workers", "2")

    assert pytest.approx(9 * 1024 / 10_400) == cell["modes"]["kv"]["mean"]["achievable"]


def test_named_blocks() -> None:
    """Equal ids are equal blocks; a partial block has no name."""
    one = named_blocks(TraceRequest(0.0, 100, 1, (7, 8), 64), 16)
    other = named_blocks(TraceRequest(0.0, 128, 1, (7, 9), 64), 16)

    assert (6, 8) == (len(one), len(other))
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])


def test_published_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Heimdall's own figures stand beside ours, with how many times less than random's each is."""
    flags = ["--timing", "h100", "--workload", "heimdall", "--stages", "46x1!,3x10", "--workers", "2"]

    assert 0 == main([*flags, "--router-mode", "random", "--router-mode", "kv:auto"])

    printed = capsys.readouterr().out
    published = next(line for line in printed.splitlines() if "published: prefix cache-aware" in line)
    assert ["217", "719", "1,107", "20.5×", "/", "12.9×", "/", "16.2×"] == published.split()[3:]
    assert "here: random" in printed
    assert "here: kv:auto" in printed


def test_page_of_a_ladder(tmp_path: Path) -> None:
    """Two plots for each load, and three over the loads; the weights of a mode are one line."""
    page = tmp_path / "page.html"
    flags = ["--timing", "reference", "--requests", "80", "--workers", "2", "--load", "0.3,0.6"]
    weights = ["--router-mode", "kv:8", "--router-mode", "kv:1", "--router-mode", "kv"]

    assert 0 == main([*flags, *weights, "--html", str(page)])

    html = page.read_text().partition("</head>")[2]
    assert 2 * 2 + 3 == html.count('class="plotly-graph-div"')
    assert 2 == html.count('"hovertext":["kv:1","kv:8"]')
    assert "<h2>trace, cache 100%: by load</h2>" in html


def test_compared_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell has a table with the oracle first; the file has all figures."""
    flags = ["--workers", "2", "--seeds", "2", "--replicas", "2", "--load", "0.5,0.8"]

    cells = simulated(tmp_path, *flags, "--router-mode", "kv:8", "--router-mode", "least-loaded")

    shown = capsys.readouterr().out
    assert [0.5, 0.8] == [cell["load"] for cell in cells]
    assert ["oracle", "kv:8", "least-loaded"] == list(cells[0]["modes"])
    kv = cells[1]["modes"]["kv:8"]
    assert kv["mean"]["ttft_p50_s"] <= kv["mean"]["ttft_p90_s"] <= kv["mean"]["e2e_p99_s"]
    assert "trace: cache 100%, load 0.8, " in shown
    assert f"{kv['regret_ttft_p90']:+.1%}" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_named_weight(tmp_path: Path) -> None:
    """`kv:8` is kv with that weight."""
    (named,) = simulated(tmp_path, "--router-mode", "kv:8")
    (flagged,) = simulated(tmp_path, "--router-mode", "kv", "--kv-overlap-score-weight", "8")

    one, other = named["modes"]["kv:8"]["mean"], flagged["modes"]["kv"]["mean"]
    assert one["cached"] == pytest.approx(other["cached"], rel=0.1)
    assert one["ttft_p90_s"] == pytest.approx(other["ttft_p90_s"], rel=0.2)
