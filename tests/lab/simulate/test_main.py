"""`python -m kvrouter.lab.simulate`, over the excerpt of the conversation trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.lab.simulate.__main__ import main
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, TraceRequest, named_blocks, read_trace

SMALL = [
    "--requests",
    "80",
    "--workers",
    "4",
    "--tokens-per-id",
    "64",
    "--output-divisor",
    "8",
    "--duration",
    "5",
]
CUSTOM = """
from kvrouter import Policy

class First(Policy):
    def choose(self, request, candidates):
        return min(candidates, key=lambda one: one.target.worker_id)
"""


def simulated(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The figures of each mode."""
    file = tmp_path / "figures.json"
    assert 0 == main([*SMALL, "--json", str(file), *flags])
    modes: dict[str, Any] = json.loads(file.read_text())["modes"]
    return modes


def test_modes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mode serves all requests, kv more of them from caches; table and file agree."""
    modes = simulated(tmp_path, "--requests", "400", "--duration", "25")

    plain, kv = modes["round-robin"], modes["kv"]
    assert [400, 400] == [plain["requests"], kv["requests"]]
    assert {"w1": 100, "w2": 100, "w3": 100, "w4": 100} == plain["requests_by_worker"]
    assert kv["cached_token_rate"] > 1.2 * plain["cached_token_rate"] > 0
    assert 0 < kv["ttft_s"]["p50"] <= kv["ttft_s"]["p99"] < kv["latency_s"]["p99"]
    file = json.loads((tmp_path / "figures.json").read_text())
    assert kv["cached_token_rate"] < file["achievable_rate"]
    assert plain["cached_token_rate"] < file["pooled_rate"] <= file["achievable_rate"]
    assert kv["cached_token_rate"] <= kv["best_engines_rate"] <= file["achievable_rate"]
    assert plain["cached_token_rate"] < 0.9 * plain["best_engines_rate"], "blocks are elsewhere"
    rates = kv["cached_token_rate"], file["achievable_rate"], kv["best_engines_rate"], file["pooled_rate"]
    kv_part = "cached: kv {:.1%} of {:.1%} possible (best engines {:.1%}, one pooled cache {:.1%});".format(
        *rates
    )
    assert f"{kv_part} round-robin {plain['cached_token_rate']:.1%}" in capsys.readouterr().out


def test_page(tmp_path: Path) -> None:
    """--html has the table of the modes and three plots."""
    page = tmp_path / "page.html"
    modes = simulated(tmp_path, "--html", str(page), "--router-mode", "random", "--router-mode", "kv")

    html = page.read_text().partition("</head>")[2]
    for mode, figures in modes.items():
        assert f"<td>{mode}</td><td>{figures['cached_token_rate']:.1%}</td>" in html
    assert 3 == html.count('class="plotly-graph-div"')


def test_same_seed_same_figures(tmp_path: Path) -> None:
    """Runs with the same seed agree, and runs with different seeds differ."""
    flags = ["--router-mode", "kv", "--router-temperature", "0.5"]

    assert simulated(tmp_path, *flags) == simulated(tmp_path, *flags)
    assert simulated(tmp_path, *flags) != simulated(tmp_path, *flags, "--seed", "2")


def test_custom_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom class runs after the modes; a worker without requests is listed with 0."""
    (tmp_path / "first_only.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)

    modes = simulated(tmp_path, "--router-mode", "random", "--router-policy", "first_only:First")

    assert ["random", "own"] == list(modes)
    assert {"w1": 80, "w2": 0, "w3": 0, "w4": 0} == modes["own"]["requests_by_worker"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "nowhere.jsonl"], "cannot read the trace nowhere.jsonl"),
        (["--tokens-per-id", "40"], "must be a multiple of --block-size 16"),
        (["--tokens-per-id", "1024"], "tokens_per_id 1024: use 1 to 512"),
        (["--max-model-len", "5"], "every prompt is longer than --max-model-len 5"),
        (["--max-model-len", "500000"], "does not fit"),
        (["--router-policy", "nowhere:Class"], "nowhere"),
    ],
)
def test_rejected_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a wrong command line states what to change."""
    assert 2 == main([*SMALL, *flags])

    assert message in capsys.readouterr().err


def test_too_long_requests_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The output counts them."""
    trace = read_trace(CONVERSATION_EXCERPT, 80)
    longer = sum(request.prompt_tokens // 8 >= 2000 for request in trace)

    assert 0 == main([*SMALL, "--max-model-len", "2000", "--router-mode", "kv"])

    assert 80 > longer > 0
    assert f"left out: {longer} requests longer than --max-model-len" in capsys.readouterr().out


def test_qwen_bailian_trace(tmp_path: Path) -> None:
    """Its ids of 16 tokens are the engines' blocks; step models take 32 of them as one."""
    rows = [
        {"chat_id": n, "timestamp": 60.5 + n, "input_length": 1040, "output_length": 4, "hash_ids": ids}
        for n, ids in enumerate([[*range(64), 1000 + n] for n in range(10)])
    ]
    trace = tmp_path / "qwen.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "figures.json"
    flags = ["--trace", str(trace), "--json", str(file), "--router-mode", "kv", "--workers", "2"]

    assert 0 == main(flags)
    assert pytest.approx(9 * 1024 / 10_400) == json.loads(file.read_text())["achievable_rate"]
    assert 0 == main([*flags, "--timing", "reference"])
    (cell,) = json.loads(file.read_text())["cells"]
    assert pytest.approx(9 * 1024 / 10_400) == cell["modes"]["kv"]["mean"]["achievable"]


def test_named_blocks() -> None:
    """Equal ids are equal blocks; a partial block has no name."""
    one = named_blocks(TraceRequest(0.0, 100, 1, (7, 8), 64), 16)
    other = named_blocks(TraceRequest(0.0, 128, 1, (7, 9), 64), 16)

    assert (6, 8) == (len(one), len(other))
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])


# --- step models ---


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
    file = tmp_path / "figures.json"
    flags = [
        "--timing",
        "reference",
        "--requests",
        "150",
        "--workers",
        "2",
        "--seeds",
        "2",
        "--replicas",
        "2",
    ]
    flags += ["--load", "0.5,0.8", "--router-mode", "kv:8", "--router-mode", "least-loaded"]

    assert 0 == main([*flags, "--json", str(file)])

    cells = json.loads(file.read_text())["cells"]
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
    file = tmp_path / "figures.json"
    flags = [
        "--timing",
        "reference",
        "--requests",
        "150",
        "--workers",
        "4",
        "--load",
        "0.7",
        "--json",
        str(file),
    ]
    weight = ["--kv-overlap-score-weight", "8"]

    assert 0 == main([*flags, "--router-mode", "kv:8"])
    named = json.loads(file.read_text())["cells"][0]["modes"]["kv:8"]["mean"]
    assert 0 == main([*flags, "--router-mode", "kv", *weight])
    flagged = json.loads(file.read_text())["cells"][0]["modes"]["kv"]["mean"]

    assert named["cached"] == pytest.approx(flagged["cached"], rel=0.1)
    assert named["ttft_p90_s"] == pytest.approx(flagged["ttft_p90_s"], rel=0.2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "0.5"], "--load needs --timing reference or large-steps or h100"),
        (["--timing", "reference", "--load", "0.5", "--pace", "2"], "use one of them"),
    ],
)
def test_flags_that_do_not_fit(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the flags."""
    assert 2 == main(flags)

    assert message in capsys.readouterr().err


def test_unknown_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists the modes."""
    assert 2 == main(["--router-mode", "kw:8"])
    assert "--router-mode 'kw:8': must be one of kv, kv-score, " in capsys.readouterr().err
