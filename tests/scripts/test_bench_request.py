"""`scripts/bench request`: a frontend with faked sockets answers, and the profile's shares make a whole."""

from __future__ import annotations

import cProfile
import json
import pstats
import time
from pathlib import Path

import pytest

from kvrouter.frontend.plain_head import parse_plain
from scripts.kit.bench.request import REQUESTS, main, shares


def test_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both modes are measured on the fast path; with a profile the parts sum up to the figure."""
    figures = tmp_path / "figures.json"

    assert 0 == main(["--runs", "1", "--requests", "300", "--profile", f"--json={figures}"])
    for row in json.loads(figures.read_text())["us"].values():
        request, stream, event = (row.pop(name) for name in ("request", "stream of 2", "event"))
        assert 0 < event < stream
        assert 0 < row["frontend"] < request
        assert request == pytest.approx(sum(row.values()))
    assert "plain_connection.py" in capsys.readouterr().out


def test_shares() -> None:
    """Time in built-in functions is that of their callers; what is no code of ours is `other`."""
    with cProfile.Profile() as profile:
        for request in REQUESTS * 20:
            parse_plain(request.partition(b"\r\n\r\n")[0])
        time.sleep(0.05)
    found = shares(pstats.Stats(profile))

    assert 1 == pytest.approx(sum(found.values()))
    assert {"other", "frontend"} == set(found)
    assert found["frontend"] < 0.5 < found["other"]
