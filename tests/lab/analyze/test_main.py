"""`kvrouter analyze`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.lab.analyze.__main__ import main
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT

EXCERPT = [str(CONVERSATION_EXCERPT), "--requests", "300"]


def bailian(number: int, at: float, ids: list[int]) -> dict[str, Any]:
    """A line of a Qwen-Bailian trace."""
    return {
        "chat_id": number, "parent_chat_id": -1, "timestamp": at, "input_length": 16 * len(ids),
        "output_length": 5, "type": "text", "turn": 1, "hash_ids": ids,
    }  # fmt: skip


def test_text_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All three have the same figures."""
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"

    assert 0 == main([*EXCERPT, "--json", str(figures), "--html", str(page)])

    read, text, html = json.loads(figures.read_text()), capsys.readouterr().out, page.read_text()
    endless = f"{read['rates']['endless']:.1%}"
    assert (300, 512, 1.0) == (read["requests"], read["core"]["id_tokens"], read["breadth"]["trunk"]["share"])
    assert endless == text.partition("one endless cache")[2].split()[0]
    assert f"<td>one endless cache</td><td>{endless}</td>" in html
    assert {"mean", "p50", "p90", "p99"} == {*read["input"]}
    for rule in read["guide"]:
        assert rule["rule"] in text
        assert f"<li>{rule['rule']}</li>" in html
    assert 5 == html.count('class="plotly-graph-div"')
    assert "src=" not in html.partition("<h1>")[2], "nothing is loaded from elsewhere"


def test_bailian_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ids have 16 tokens, its times are seconds, and blocks of several ids are judged, too."""
    trace = tmp_path / "qwen.jsonl"
    rows = [bailian(number, 60.5 + number, [*range(10), 100 + number]) for number in range(20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert 0 == main([str(trace), "--workers", "2", "--json", str(tmp_path / "out.json")])

    read = json.loads((tmp_path / "out.json").read_text())
    assert (19.0, 16, {"16": 19 * 160, "32": 19 * 160, "64": 19 * 128, "128": 19 * 128}) == (
        read["span_s"], read["core"]["id_tokens"],
        {size: round(rate * 20 * 176) for size, rate in read["rates"]["by_block_size"].items()},
    )  # fmt: skip
    assert "20 requests in 19 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "trace.jsonl:2: Input data was truncated: a line is a JSON object with timestamp"),
        (json.dumps(bailian(2, 1.0, [1])), "trace.jsonl:2: timestamp 1.0 is before the previous line's"),
        (json.dumps({**bailian(2, 70, [1]), "input_length": 33}), "trace.jsonl:2: input_length 33 needs 3"),
    ],
)
def test_hostile_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    """One line on stderr names the place; nothing is printed or written."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text(json.dumps(bailian(1, 60.0, [1])) + "\n" + line + "\n")

    assert 2 == main([str(trace), "--json", str(out)])

    printed = capsys.readouterr()
    assert says in printed.err
    assert 1 == printed.err.count("\n")
    assert ("", False) == (printed.out, out.exists())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give a trace, or --live ADMIN_URL: one of the two"),
        ([*EXCERPT, "--live", "http://127.0.0.1:1"], "one of the two"),
        ([*EXCERPT, "--save-trace", "t", "--output-tokens", "9"], "--save-trace needs --live"),
        (["--live", "http://a:1", "--save-trace", "t"], "--save-trace needs --output-tokens"),
        ([*EXCERPT, "--output-tokens", "9"], "--output-tokens needs --live: a trace has the lengths"),
        ([*EXCERPT, "--block-size", "24"], "--block-size 24: must divide the trace's 512 tokens"),
        (["nowhere.jsonl"], "cannot read the trace nowhere.jsonl: No such file"),
        (["--live", "http://127.0.0.1:1"], "http://127.0.0.1:1 cannot be reached"),
        ([*EXCERPT, "--html", "/nowhere/page.html"], "--html /nowhere/page.html: No such file"),
        ([*EXCERPT, "--json", "/nowhere/f.json"], "--json /nowhere/f.json: No such file"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    """The message says what to change, and nothing is printed."""
    assert 2 == main(flags)

    printed = capsys.readouterr()
    assert says in printed.err
    assert "" == printed.out


def test_without_plotly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the extra, before any work."""

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)

    assert 2 == main(["nowhere.jsonl", "--html", "page.html"])

    assert "--html needs Plotly: pip install 'kvrouter[report]'" in capsys.readouterr().err
