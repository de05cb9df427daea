"""What the tools show during an incident, as files: one directory for each incident."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvrouter.observe.replica import open_replicas
from kvrouter.observe.top.__main__ import look_twice
from kvrouter.observe.top.screen import Choices, draw
from kvrouter.observe.top.settings import COMMAND
from kvrouter.observe.top.view import view
from kvrouter.settings.read import load
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
        "kvrouter:wrong_prediction_ratio:rate5m",
    ),
    "changed-prompts": (
        "topk(5, kvrouter:target_ttft_seconds:mean5m)",
        "kvrouter:cached_ratio:rate5m",
        "kvrouter:cached_ratio:rate5m offset 1m",
    ),
    "long-answers": (
        "histogram_quantile(0.9, sum by (le) (rate(kvrouter_inter_token_seconds_bucket[10s])))",
        "histogram_quantile(0.9, sum by (le) (rate(kvrouter_first_byte_seconds_bucket[10s])))",
        "sum(rate(kvrouter_output_tokens_total[10s])) / sum(rate(kvrouter_requests_total[10s]))",
        "sum(rate(kvrouter_output_tokens_total[10s] offset 30s))"
        " / sum(rate(kvrouter_requests_total[10s] offset 30s))",
        "sum(rate(kvrouter_requests_total[10s]))",
        "sum(rate(kvrouter_requests_total[10s] offset 30s))",
        "sum(kvrouter_requests_in_flight)",
        "max by (worker) (kvrouter_engine_running)",
    ),
    "swapped-events": (
        "kvrouter:wrong_prediction_ratio:rate5m",
        "min by (worker, instance) (kvrouter_prediction_exact_ratio)",
        "sum by (worker, result) (rate(kvrouter_predictions_total[10s]))",
        "kvrouter_worker_problem",
        "kvrouter:cached_ratio:rate5m",
    ),
    "small-cache": (
        "max by (worker) (kvrouter_target_capacity_blocks)",
        "max by (worker) (kvrouter_target_blocks)",
        "kvrouter:error_ratio:rate5m",
    ),
}
# More flags of the doctor, after a look without them.
DOCTOR_FLAGS = {"swapped-events": ("--owners",)}
RUNBOOK = Path(__file__).resolve().parents[3] / "docs" / "runbook.md"
_MOST_LOG_LINES = 6
# The access log of a replica, in lines, from about 20 seconds.
_CLIENT_LINES = 100
_LOOK_S = 5.0
_WIDTH, _HEIGHT = 130, 16


async def gather(incident: Incident, scene: Scene, prometheus: Prometheus, directory: Path) -> None:
    """Alerts, PromQL, top, doctor, the dashboard, the last warnings of the logs, the access log by client."""
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
    (own / "doctor.txt").write_text(await _kvrouter("doctor", *bus, *admins))
    if more := DOCTOR_FLAGS.get(incident.name):
        (own / "doctor-more.txt").write_text(await _kvrouter("doctor", *more, *bus, *admins))
    (own / "log.txt").write_text("\n".join(_warnings(scene)) + "\n")
    (own / "clients.txt").write_text(await _clients(scene))


def client_recipe() -> str:
    """The commands of the runbook that group the access log by client; LINES and FILES are to be replaced."""
    section = RUNBOOK.read_text().partition("\n## Which client?\n")[2].partition("\n## ")[0]
    return "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))


async def _clients(scene: Scene) -> str:
    logs = [str(scene.fleet.processes[name].log) for name in _names("frontend", scene.deployed.replicas)]
    recipe = client_recipe().replace("LINES", str(_CLIENT_LINES)).replace("FILES", shlex.join(logs))
    return await _output("sh", "-c", recipe)


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


async def _kvrouter(*arguments: str) -> str:
    return f"$ kvrouter {' '.join(arguments)}\n{await _output(sys.executable, '-m', 'kvrouter', *arguments)}"


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return f"{output.decode()}(exit code {process.returncode})\n"


def _warnings(scene: Scene) -> Sequence[str]:
    """The last warnings of each replica and agent, without those of single requests."""
    found = []
    for name in (*_names("frontend", scene.deployed.replicas), *_names("agent", scene.deployed.engines)):
        lines = [
            line
            for line in scene.fleet.processes[name].log.read_text().splitlines()
            if '"level":"warning"' in line.replace(" ", "") and '"request.' not in line
        ]
        found += [f"{name}: {line}" for line in lines[-_MOST_LOG_LINES:]]
    return found


def _names(kind: str, processes: Sequence[object]) -> list[str]:
    return [f"{kind}-{number}" for number in range(len(processes))]
