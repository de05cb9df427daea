"""deploy/grafana: each expression of the dashboard names metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from scripts.kit.proxies import DEPLOY

DASHBOARD = json.loads((DEPLOY / "grafana" / "kvrouter.json").read_text())
METRICS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()

# Documented metrics that no panel shows, and why.
NOT_SHOWN = {
    # only with a feature that most fleets do not use
    "kvrouter_kv_transfer_seconds",
    "kvrouter_media_prompts_total",
    "kvrouter_pd_pair_failures_total",
    "kvrouter_pd_requests_total",
    "kvrouter_policy_troubles_total",
    "kvrouter_process_scraped",
    "kvrouter_remote_tokenizations_total",
    "kvrouter_removed_fields_total",
    "kvrouter_spans_total",
    "kvrouter_tenant_tokens_total",
    "kvrouter_token_ids_sent_total",
    "kvrouter_tokenizer_checks_total",
    # how much of long prompts is known: sizes within fixed bounds
    "kvrouter_prefix_store_characters_total",
}


def expressions() -> list[str]:
    """Of all panels."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_metrics_are_documented(expression: str) -> None:
    """A histogram's buckets by the name of the histogram."""
    for name in re.findall(r"kvrouter_\w+", expression):
        assert f"`{re.sub('_(bucket|sum|count)$', '', name)}`" in METRICS


def test_shows_each_metric() -> None:
    """The metrics of docs/metrics.md, except a list."""
    documented = set(re.findall(r"^\| `(kvrouter_\w+)` \|", METRICS, re.MULTILINE))
    used = {re.sub("_(bucket|sum|count)$", "", name) for name in _names(expressions())}

    assert documented - used == NOT_SHOWN


def _names(texts: list[str]) -> set[str]:
    return {name for text in texts for name in re.findall(r"kvrouter_\w+", text)}


def test_panels_do_not_overlap() -> None:
    """Several in a row of 24 columns, with a number of their own."""
    panels = DASHBOARD["panels"]
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels]

    assert len(panels) == len(set(places)) == len({one["id"] for one in panels})
    assert all(one["gridPos"]["x"] + one["gridPos"]["w"] <= 24 for one in panels)
    assert all(one["title"] for one in panels)


def test_compose_provisions_it() -> None:
    """The data source has the id that the panels name; all files are mounted."""
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"][0]
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["grafana"]
    mounted = {volume.split(":")[0].rpartition("/")[2] for volume in service["volumes"]}

    assert {source["uid"]} == {one["datasource"]["uid"] for one in DASHBOARD["panels"] if "datasource" in one}
    assert {path.name for path in (DEPLOY / "grafana").iterdir()} == mounted
