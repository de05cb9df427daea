"""A Prometheus server that scrapes a fleet with the alert rules of deploy/prometheus, in less time.

The binaries `prometheus` and `promtool` have to be on PATH (Debian: apt-get install prometheus).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from scripts.kit.dashboard import VARIABLES, panels
from scripts.kit.fleet import Fleet, FleetError, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.proxies import DEPLOY

RULES = DEPLOY / "prometheus" / "kvrouter.rules.yml"

_UNITS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\[|\bfor: )(\d+)([smh])")


def has_prometheus() -> bool:
    return shutil.which("prometheus") is not None


def in_less_time(rules: str, speedup: float, least_s: int = 4) -> str:
    """The rules with all ranges and waits divided by `speedup`, but ranges of `least_s` seconds at least.

    A range of two scrapes is the shortest that has a rate.
    """

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _UNITS[found[3]] / speedup
        return f"{found[1]}{max(least_s if found[1] == '[' else 1, round(seconds))}s"

    return _DURATION.sub(shorter, rules)


def with_objectives(rules: str, objectives: Mapping[str, float]) -> str:
    """The rules with other objectives, by the end of the record's name, as in `ttft_p90_seconds`."""
    for name, value in objectives.items():
        pattern = rf"(record: kvrouter:objective:{name}\n\s+expr: )vector\(\S+\)"
        rules, count = re.subn(pattern, rf"\g<1>vector({value:g})", rules)
        assert count == 1, name
    return rules


def alerts_of(rules: str) -> dict[str, dict[str, Any]]:
    """The alert rules by name."""
    groups = yaml.safe_load(rules)["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def expressions_of(rules: str) -> list[str]:
    return [rule["expr"] for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]]


def dashboard_expressions(interval_s: int = 10) -> list[str]:
    """Of all panels of deploy/grafana, for any fleet, with rates over `interval_s`."""
    found = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    found = [one.replace("$__rate_interval", f"{interval_s}s") for one in found]
    return [re.sub(rf"\$(?:{'|'.join(VARIABLES)})\b", ".*", one) for one in found]


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str
    client: Client

    async def series(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression: rows with `metric` and `value`."""
        answer = await self.client.get_json(f"{self.url}/api/v1/query?query={quote(expression)}")
        rows: list[dict[str, Any]] = answer["data"]["result"]
        return rows

    async def had_series(self, expression: str) -> bool:
        """Whether the expression has had a number at any moment of the last half hour."""
        rows = await self.series(f"max_over_time(({expression})[30m:2s])")
        return any(row["value"][1] != "NaN" for row in rows)

    async def fired(self, within_s: float) -> set[str]:
        """The alerts that have fired at any moment of the last `within_s` seconds."""
        fired = f'count_over_time(ALERTS{{alertstate="firing"}}[{max(1, round(within_s))}s])'
        return {row["metric"]["alertname"] for row in await self.series(fired)}

    async def firing(self) -> dict[str, str]:
        """The alerts that fire, and the summary of one of each."""
        answer = await self.client.get_json(f"{self.url}/api/v1/alerts")
        return {
            alert["labels"]["alertname"]: alert["annotations"]["summary"]
            for alert in answer["data"]["alerts"]
            if alert["state"] == "firing"
        }

    async def until_firing(self, names: Collection[str], timeout_s: float) -> dict[str, float]:
        """Seconds until each of these alerts fired; alerts that did not within `timeout_s` are missing."""
        began, found = time.perf_counter(), dict[str, float]()
        while len(found) < len(names) and time.perf_counter() - began < timeout_s:
            for name in await self.firing():
                if name in names:
                    found.setdefault(name, time.perf_counter() - began)
            await asyncio.sleep(0.25)
        return found

    async def until_quiet(self, timeout_s: float, ignored: Collection[str] = ()) -> dict[str, str]:
        """Wait until no alert fires but the ignored ones; returns the alerts that still do."""
        began = time.perf_counter()
        while time.perf_counter() - began < timeout_s:
            left = {name: text for name, text in (await self.firing()).items() if name not in ignored}
            if not left:
                break
            await asyncio.sleep(0.5)
        return left


async def start_prometheus(
    fleet: Fleet,
    client: Client,
    targets: Mapping[str, Sequence[str]],
    rules: str,
    *,
    interval_s: float = 1.0,
) -> Prometheus:
    """Scrape these addresses, by job, every `interval_s` seconds. Raises FleetError."""
    if not has_prometheus():
        raise FleetError("prometheus is not installed: apt-get install prometheus")
    (port,) = free_ports(1)
    directory = fleet.directory / "prometheus"
    directory.mkdir()
    (directory / "rules.yml").write_text(rules)
    interval = f"{round(interval_s * 1000)}ms"
    config = {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), interval),
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in targets.items()
        ],
    }
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(config))
    process = await fleet.start("prometheus", _command(file, directory / "data", port))
    url = f"http://127.0.0.1:{port}"
    await wait_until_ok(client, process, f"{url}/-/ready")
    return Prometheus(url, client)


def _command(file: Path, data: Path, port: int) -> list[str]:
    return [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
