"""deploy/grafana: the dashboard names metrics that there are, of the fleet that is chosen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from scripts.kit.dashboard import FILE, VARIABLES, panels, written
from scripts.kit.proxies import DEPLOY

DASHBOARD = json.loads(FILE.read_text())
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
    return [target["expr"] for panel in panels(DASHBOARD) for target in panel.get("targets", ())]


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


def test_as_the_catalog_has_it() -> None:
    """Each selector has the variables that its metric has labels for, each panel what its metrics mean.

    If not: python -m scripts.kit.dashboard.
    """
    assert FILE.read_text() == written()
    assert all(panel["description"] for panel in panels(DASHBOARD) if panel["type"] != "row")


def test_variables() -> None:
    """The data source and one fleet are chosen; all models and pools, and namespaces where there are any."""
    chosen = {one["name"]: one for one in DASHBOARD["templating"]["list"]}

    assert ("datasource", *VARIABLES) == tuple(chosen)
    assert {"namespace", "model", "pool"} == {name for name, one in chosen.items() if one.get("includeAll")}
    assert all(chosen[name]["allValue"] == ".*" for name in ("namespace", "model", "pool"))
    for one in expressions():
        assert {*re.findall(r"\$(\w+)", one)} <= {*chosen, "__rate_interval"}


def test_what_matters_stands_first() -> None:
    """Numbers of the moment, then what users see; what explains them is in closed rows."""
    rows = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    first = DASHBOARD["panels"][1 : DASHBOARD["panels"].index(rows[1])]

    assert {"stat"} == {panel["type"] for panel in first}
    assert [False, False, *[True] * (len(rows) - 2)] == [row["collapsed"] for row in rows]


def test_panels_do_not_overlap() -> None:
    """Several in a row of 24 columns, with a number of their own. A closed row has its own places."""
    for group in (DASHBOARD["panels"], *[row["panels"] for row in DASHBOARD["panels"] if row.get("panels")]):
        places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in group]
        assert len(group) == len(set(places))
    whole = [*panels(DASHBOARD)]

    assert len(whole) == len({one["id"] for one in whole})
    assert all(one["gridPos"]["x"] + one["gridPos"]["w"] <= 24 for one in whole)
    assert all(one["title"] for one in whole)


def test_compose_provisions_it() -> None:
    """There is a data source to choose; all files are mounted."""
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"][0]
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["grafana"]
    mounted = {volume.split(":")[0].rpartition("/")[2] for volume in service["volumes"]}

    assert source["type"] == DASHBOARD["templating"]["list"][0]["query"]
    assert {path.name for path in (DEPLOY / "grafana").iterdir()} == mounted
