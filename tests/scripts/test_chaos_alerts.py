"""Rows of `scripts/chaos` that Prometheus must notice. The whole run is long: KVROUTER_TEST_LONG=1."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.kit.chaos.faults import ROWS
from scripts.kit.chaos.script import main
from scripts.kit.prometheus import RULES, alerts_of
from scripts.kit.workload import Documents, of_two_teams
from tests.long import needs_long

RUNBOOK = Path(__file__).resolve().parents[2] / "docs" / "runbook.md"


def test_each_alert_has_a_row() -> None:
    """And each expected alert is a rule."""
    assert set(alerts_of(RULES.read_text())) == {name for row in ROWS for name in row.alerts}


def test_documents() -> None:
    """Chats about the same few documents, the same each time."""
    chats = Documents(count=3, tokens=50).chats(20)
    systems = {json.loads(chat.body)["messages"][0]["content"] for chat in chats}

    assert chats == Documents(count=3, tokens=50).chats(20)
    assert 3 == len(systems)
    assert len({chat.body for chat in chats}) == 20


def test_two_teams() -> None:
    """Their requests alternate, and come from three addresses each."""
    chats = Documents(count=3, tokens=50).chats(20)

    sent = of_two_teams(chats)

    assert [chat.body for chat in chats] == [chat.body for chat in sent]
    clients = [chat.headers["X-Forwarded-For"] for chat in sent]
    assert {"10.0.1.7", "10.0.1.8", "10.0.1.9"} == set(clients[::2])
    assert {"10.0.2.7", "10.0.2.8", "10.0.2.9"} == set(clients[1::2])


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_recipe_by_client(tmp_path: Path) -> None:
    """The runbook's line groups the last lines of all logs by client; other lines do not count."""
    first, second = tmp_path / "a b.log", tmp_path / "c.log"
    served = {"event": "request.served", "prompt_tokens": 100, "cached_tokens": 80, "output_tokens": 24}
    first.write_text(
        _lines({**served, "client": "9.9.9.9", "duration_s": 99}, "not JSON", {"event": "other"})
    )
    second.write_text(
        _lines(
            {**served, "client": "10.0.1.7", "duration_s": 0.5},
            {**served, "client": "10.0.2.7", "duration_s": 6.0, "output_tokens": 500},
            {**served, "client": "10.0.2.7", "duration_s": 5.0, "cached_tokens": 0},
        )
    )
    section = RUNBOOK.read_text().partition("\n## Which client?\n")[2].partition("\n## ")[0]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    recipe = "\n".join(lines).replace("LINES", "3").replace("FILES", f"'{first}' '{second}'")

    found = subprocess.run(["sh", "-c", recipe], capture_output=True, text=True, check=True)

    assert [
        "99 s in 1 requests, each 100 prompt tokens, 80% cached, 24 output tokens, 99.00 s: 9.9.9.9",
        "11 s in 2 requests, each 100 prompt tokens, 40% cached, 262 output tokens, 5.50 s: 10.0.2.7",
        "0 s in 1 requests, each 100 prompt tokens, 80% cached, 24 output tokens, 0.50 s: 10.0.1.7",
    ] == found.stdout.splitlines()


def _lines(*lines: dict[str, object] | str) -> str:
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


@needs_long("twelve minutes")
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_alerts_fire_and_end() -> None:
    """No alert fires in the healthy fleet; each fault makes its alerts fire, and they end with it."""
    assert 0 == main(["--alerts"])
