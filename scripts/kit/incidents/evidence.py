"""What the tools show during an incident, as files: one directory for each incident."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvrouter.settings.read import load
from kvrouter.top.__main__ import look_twice
from kvrouter.top.screen import Choices, draw
from kvrouter.top.settings import COMMAND
from kvrouter.top.view import view
from kvrouter.verify.index_command import open_replicas
from scripts.kit.incidents.faults import Incident, Scene
from scripts.kit.prometheus import Prometheus
from scripts.kit.screenshots import SCHEMES, has_browser, take

# What an operator asks of Prometheus, by incident.
QUERIES = {
    "slow-worker": (
        "topk(5, kvrouter:target_ttft_seconds:mean5m)",
        "max by (worker) (kvrouter_charged_prefill_tokens)",
        "max by (worker) (kvrouter_target_requests)",
    ),
    "wrong-template": (
        "min by (worker, instance) (kvrouter_prediction_exact_ratio)",
        "count by (hash) (kvrouter_config_info)",
        "max by (instance, worker, problem) (kvrouter_worker_problem)",
    ),
    "nats-node": (
        "kvrouter_replicas",
        "kvrouter_workers",
        "kvrouter_nats_connected",
    ),
    "hot-prefix": (
        "max by (worker) (kvrouter_charged_prefill_tokens)",
        "sum(rate(kvrouter_prompt_tokens_total[30s])) / sum(rate(kvrouter_requests_total[30s]))",
        "sum by (cache) (rate(kvrouter_uncached_tokens_total[30s]))",
    ),
    "changed-prompts": (
        "topk(5, kvrouter:target_ttft_seconds:mean5m)",
        "kvrouter:cached_ratio:rate5m",
        "kvrouter:cached_ratio:rate5m offset 1m",
    ),
    "small-cache": (
        "max by (worker) (kvrouter_target_capacity_blocks)",
        "max by (worker) (kvrouter_target_blocks)",
        "kvrouter:error_ratio:rate5m",
    ),
}
_MOST_LOG_LINES = 6
_LOOK_S = 5.0
_WIDTH, _HEIGHT = 130, 16


async def gather(incident: Incident, scene: Scene, prometheus: Prometheus, directory: Path) -> None:
    """Alerts, PromQL, top, doctor, the dashboard, and the last warnings of the replicas' logs."""
    own = directory / incident.name
    own.mkdir(exist_ok=True)
    firing = await prometheus.firing()
    (own / "alerts.txt").write_text("".join(f"{name}: {text}\n" for name, text in sorted(firing.items())))
    lines = []
    for query in QUERIES.get(incident.name, ()):
        lines.append(query)
        for row in await prometheus.series(query):
            labels = {name: text for name, text in row["metric"].items() if name not in {"__name__", "job"}}
            lines.append(f"    {json.dumps(labels)}  {float(row['value'][1]):.4g}")
    (own / "promql.txt").write_text("\n".join(lines) + "\n")
    admins = [replica.admin_url for replica in scene.deployed.replicas]
    nats = scene.fleet.processes["frontend-0"].command
    bus = [word for word in nats if word.startswith(("--nats", "--namespace"))]
    (own / "top.svg").write_text(await _top(admins))
    if has_browser():
        for scheme in SCHEMES:
            wrong = await take(admins[0], own, scheme=scheme)
            (own / f"console-{scheme}.txt").write_text("".join(f"{line}\n" for line in wrong))
    (own / "doctor.txt").write_text(await _output("doctor", *bus, *admins))
    (own / "log.txt").write_text("\n".join(_warnings(scene)) + "\n")


async def _top(urls: Sequence[str]) -> str:
    """What `kvrouter top` draws of these replicas, as SVG."""
    settings = load(COMMAND, [*urls, "--sort=ttft"]).settings
    async with open_replicas(urls, settings) as replicas:
        seen = await look_twice(replicas, _LOOK_S)
    shown, choices = view(seen), Choices(settings.sort, shows_detail=True)
    console = Console(width=_WIDTH, height=_HEIGHT, record=True, file=io.StringIO(), highlight=False)
    console.print(draw(shown, choices, width=_WIDTH, height=_HEIGHT))
    # without the fonts that rich takes from elsewhere
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="kvrouter top"), flags=re.DOTALL)


async def _output(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvrouter",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return f"$ kvrouter {' '.join(arguments)}\n{output.decode()}(exit code {process.returncode})\n"


def _warnings(scene: Scene) -> Sequence[str]:
    """The last warnings of each replica, without those of single requests."""
    found = []
    for number in range(len(scene.deployed.replicas)):
        lines = [
            line
            for line in scene.fleet.processes[f"frontend-{number}"].log.read_text().splitlines()
            if '"level":"warning"' in line.replace(" ", "") and '"request.' not in line
        ]
        found += [f"replica {number}: {line}" for line in lines[-_MOST_LOG_LINES:]]
    return found
