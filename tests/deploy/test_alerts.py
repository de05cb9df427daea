"""deploy/prometheus: each rule names metrics that there are, and each alert has its page in the runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.kit.prometheus import (
    RULES,
    alerts_of,
    dashboard_expressions,
    expressions_of,
    in_less_time,
    with_objectives,
)

TEXT = RULES.read_text()
DOCS = Path(__file__).parents[2] / "docs"
UNIT_TESTS = RULES.with_name("kvrouter.rules.test.yml")
NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
METRICS, RUNBOOK = (DOCS / "metrics.md").read_text(), (DOCS / "runbook.md").read_text()


@pytest.mark.parametrize("expression", expressions_of(TEXT))
def test_metrics_and_labels_are_documented(expression: str) -> None:
    """A histogram's buckets by the name of the histogram; values of labels as the table has them."""
    for name in re.findall(r"\bkvrouter_\w+", expression):
        known = [line for line in METRICS.splitlines() if f"| `{_family(name)}` |" in line]
        assert known, name
        for label in re.findall(rf"{name}\{{(\w+)", expression):
            assert f"`{label}`" in known[0]


def _family(name: str) -> str:
    return re.sub("_(bucket|sum|count)$", "", name)


def test_each_alert_has_a_paragraph() -> None:
    """And each paragraph an alert."""
    alerts = alerts_of(TEXT)

    assert list(alerts) == re.findall(r"^### (Kvrouter\w+)$", RUNBOOK, re.MULTILINE)
    for name, alert in alerts.items():
        assert f"docs/runbook.md#{name.lower()}" == alert["annotations"]["runbook"]
        assert alert["labels"]["severity"] in {"critical", "warning"}


@pytest.mark.parametrize("paragraph", re.split("^##.* ", RUNBOOK, flags=re.MULTILINE)[1:])
def test_paragraphs_help(paragraph: str) -> None:
    """Each has something to run, and something to do; its metrics and records are documented."""
    if paragraph.startswith("Kvrouter"):
        _, look, act = re.split(r"^\*(?:Look first|Do):\*", paragraph, flags=re.MULTILINE)
        assert "`" in look
        assert act.strip()
    for name in re.findall(r"\bkvrouter[_:][\w:]+", paragraph):
        assert f"| `{_family(name)}` |" in METRICS or f"record: {name}\n" in TEXT, name


def test_chart_has_the_same() -> None:
    """The file of the Helm chart is a copy."""
    assert TEXT == (RULES.parents[1] / "helm" / "kvrouter" / "files" / RULES.name).read_text()


def test_in_less_time() -> None:
    """Ranges and waits are shorter; nothing else changes."""
    rule = "expr: rate(a_total[5m]) > 5\nfor: 10m\n"
    assert "expr: rate(a_total[10s]) > 5\nfor: 20s\n" == in_less_time(rule, 30)
    assert "expr: rate(a_total[4s]) > 5\nfor: 1s\n" == in_less_time(rule, 600)


def test_with_objectives() -> None:
    """One objective is replaced."""
    assert TEXT.replace("vector(2)", "vector(0.5)") == with_objectives(TEXT, {"ttft_p90_seconds": 0.5})


def test_each_alert_has_a_unit_test() -> None:
    """In which it fires."""
    assert set(alerts_of(TEXT)) == set(re.findall(r'\{alertname="(\w+)"\}', UNIT_TESTS.read_text()))


@NEEDS_PROMTOOL
@pytest.mark.parametrize("speedup", [1, 30])
def test_promtool_accepts(speedup: float, tmp_path: Path) -> None:
    """The rules as they are, and in less time."""
    file = tmp_path / "rules.yml"
    file.write_text(in_less_time(TEXT, speedup))

    _promtool("check", "rules", file)


@NEEDS_PROMTOOL
def test_promql_is_valid(tmp_path: Path) -> None:
    """In the runbook, the page of incidents and the dashboard: each is accepted as a rule."""
    texts = (RUNBOOK, (DOCS / "incidents.md").read_text())
    found = [" ".join(span.split()) for text in texts for span in re.findall(r"`([^`]+)`", text)]
    asked = [span for span in found if re.search(r"\bkvrouter[_:]", span)] + dashboard_expressions()
    rules = [{"record": f"asked:{number}", "expr": expression} for number, expression in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "asked", "rules": rules}]}))

    assert len(asked) > 100
    _promtool("check", "rules", file)


@NEEDS_PROMTOOL
def test_thresholds() -> None:
    """On synthetic series: beyond its threshold each alert fires, at it and without series none does."""
    _promtool("test", "rules", UNIT_TESTS)


def _promtool(*arguments: str | Path) -> None:
    found = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert 0 == found.returncode, found.stdout + found.stderr
