"""Writes into deploy/grafana/kvrouter.json what follows from the catalog of metrics, and keeps all else.

Each selector gets the dashboard's variables that its metric has labels for, each panel the meaning of its
metrics as its description. Edit titles, expressions and places in the file itself, then run this.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from kvrouter.telemetry.catalog import METRIC_OF, METRICS
from scripts.kit.proxies import DEPLOY

FILE = DEPLOY / "grafana" / "kvrouter.json"
VARIABLES = ("namespace", "fleet", "agents", "model", "pool")

_SELECTOR = re.compile(r"(?<![\w:$])((?:kvrouter|process)_\w+|ALERTS)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'\w+(?:=~|!~|!=|=)"([^"]*)"')
# Of frontends and agents, which are in jobs of their own.
_OF_ALL = ("ALERTS", "kvrouter_build_info", "kvrouter_nats_connected", "process_")
_TEXTS = {
    "ALERTS": "alerts of deploy/prometheus that fire",
    "process_cpu_seconds_total": "CPU time of the process",
    "process_resident_memory_bytes": "resident memory of the process",
    "process_open_fds": "file descriptors that the process has open",
    "process_max_fds": "those that it may open",
}


def panels(dashboard: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """All panels, those of closed rows, too. None: of the file."""
    for panel in (json.loads(FILE.read_text()) if dashboard is None else dashboard)["panels"]:
        yield panel
        yield from panel.get("panels", ())


def metrics_of(panel: dict[str, Any]) -> list[str]:
    """The metrics that the panel shows, each once."""
    found = [one[1] for target in panel.get("targets", ()) for one in _SELECTOR.finditer(target["expr"])]
    return list(dict.fromkeys(METRIC_OF.get(name, name) for name in found))


def selected(expression: str) -> str:
    """The expression, of the fleet that the variables name."""
    return _SELECTOR.sub(_select, expression)


def _select(found: re.Match[str]) -> str:
    name = found[1]
    own = [one[0] for one in _MATCHER.finditer(found[2] or "") if not one[1].startswith("$")]
    job = "$fleet"
    if name.startswith("kvrouter_agent_"):
        job = "$agents"
    elif name.startswith(_OF_ALL):
        job = "$fleet|$agents"
    metric = METRICS.get(METRIC_OF.get(name, name))
    labels = [label for label in ("model", "pool") if metric is not None and label in metric.labels]
    chosen = [f'{label}=~"${label}"' for label in ("namespace", *labels)]
    matchers = ",".join([*own, f'job=~"{job}"', *chosen])
    return f"{name}{{{matchers}}}"


def described(panel: dict[str, Any]) -> str:
    """What the panel's metrics mean."""
    names = [name for name in metrics_of(panel) if name != "kvrouter_build_info"] or metrics_of(panel)
    texts = {name: METRICS[name].text if name in METRICS else _TEXTS[name] for name in names}
    return "\n\n".join(f"`{name}`: {text}" for name, text in texts.items())


def written() -> str:
    """The file as it should be."""
    dashboard = json.loads(FILE.read_text())
    for panel in panels(dashboard):
        if panel["type"] != "row":
            panel["datasource"] = {"type": "prometheus", "uid": "${datasource}"}
            for target in panel["targets"]:
                target["expr"] = selected(target["expr"])
            panel["description"] = described(panel)
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    FILE.write_text(written())
    return 0


if __name__ == "__main__":
    sys.exit(main())
