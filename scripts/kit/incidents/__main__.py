"""Play incidents on a real fleet: three replicas, five simulated engines, three NATS servers and a leaf node.

    python -m scripts.kit.incidents                      every incident, and the alerts that it raises
    python -m scripts.kit.incidents slow-worker          one of them
    python -m scripts.kit.incidents --evidence DIR …     also what each tool shows while it lasts

A real Prometheus scrapes the replicas, with the rules of deploy/prometheus in a thirtieth of their time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment
from scripts.kit.chaos.cluster import Link, start_cluster
from scripts.kit.deployment import Plan
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client, HttpError
from scripts.kit.incidents.evidence import gather
from scripts.kit.incidents.faults import INCIDENTS, Incident, Scene
from scripts.kit.incidents.traffic import Documents, of_two_teams
from scripts.kit.ports import free_ports
from scripts.kit.prometheus import (
    RULES,
    Prometheus,
    dashboard_expressions,
    expressions_of,
    in_less_time,
    start_prometheus,
    with_objectives,
)
from scripts.kit.script import log_directory, until_signalled
from scripts.kit.steady import SteadyLoad

ENGINES, REPLICAS = 5, 3
REQUESTS_PER_SECOND = 12.0
# A third of an H100's speed: the engines' times are far above this machine's.
SPEEDUP = 0.3
RULES_SPEEDUP = 30.0
# In the healthy fleet nine of ten first tokens come within half of this. The p90 of the time between tokens
# is 0.0195 s there, 0.0244 s with `swapped-events` (more prompts to compute), 0.0289 s with `long-answers`.
OBJECTIVES = {"ttft_p90_seconds": 0.6, "inter_token_p90_seconds": 0.026, "queue_seconds": 1.0}
HEALTHY_S = 20.0
FIRES_WITHIN_S = 60.0
QUIET_WITHIN_S = 90.0
# For minutes after a fault they report what was: lost workers, and a month's errors.
_LINGERS = (
    "KvrouterErrorBudgetSlow",
    "KvrouterErrorBudgetFast",
    "KvrouterMessagesDropped",
    "KvrouterWorkerSilent",
    "KvrouterWrongPredictions",
)
_FLAGS = (
    "--router-queue-threshold=1",
    "--circuit-breaker",
    "--circuit-breaker-failures=2",
    "--circuit-breaker-open-s=5",
    "--access-log=all",
    "--log-format=json",
    "--trusted-proxies=127.0.0.1/32",
)


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds from the fault until each alert fired; what else fired until the end; what still did then."""

    incident: Incident
    early: list[str]
    """Expected alerts that fired before the fault."""
    fired_s: dict[str, float]
    others: list[str]
    left: list[str]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.incident.alerts if name not in self.fired_s]


@asynccontextmanager
async def open_scene() -> AsyncIterator[tuple[Scene, Prometheus]]:
    """A healthy fleet under load, and the Prometheus that scrapes it. Raises FleetError."""
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(log_directory("incidents"))
        client = Client()
        stack.callback(client.close)
        fleet = await stack.enter_async_context(Fleet(directory))
        model = directory / "model"
        build_tiny_model(model)
        link = await stack.enter_async_context(Link.open())
        agent_ports = free_ports(ENGINES)
        plan = Plan(
            "kv",
            model,
            engines=ENGINES,
            replicas=REPLICAS,
            num_blocks=2_048,
            speedup=SPEEDUP,
            namespace="incidents",
            frontend_flags=_FLAGS,
            # the largest step for the queue, which fills targets up to it
            agent_flags={
                number: (
                    "--max-num-batched-tokens=8192",
                    f"--metrics-port={port}",
                    "--log-format=json",
                )
                for number, port in enumerate(agent_ports)
            },
        )
        plan, options = await start_cluster(fleet, client, plan, link)
        deployed = await deployment.deploy(fleet, client, plan, options.servers[0])
        rules = with_objectives(in_less_time(RULES.read_text(), RULES_SPEEDUP), OBJECTIVES)
        targets = {
            "kvrouter": [urlsplit(replica.admin_url).netloc for replica in deployed.replicas],
            "agents": [f"127.0.0.1:{port}" for port in agent_ports],
        }
        prometheus = await start_prometheus(fleet, client, targets, rules)
        urls = [replica.url for replica in deployed.replicas]
        requests = of_two_teams(Documents().chats(4_000))
        load = await stack.enter_async_context(SteadyLoad(requests, urls, rate=REQUESTS_PER_SECOND))
        yield Scene(fleet, client, deployed, link, load, SPEEDUP), prometheus


async def play(incident: Incident, scene: Scene, prometheus: Prometheus, evidence: Path | None) -> Result:
    """Break it, wait for the alerts, look, mend it, and wait until they have ended."""
    before, began = set(await prometheus.firing()), time.perf_counter()
    async with incident.fault(scene):
        fired = await prometheus.until_firing(incident.alerts, FIRES_WITHIN_S)
        if evidence is not None:
            await gather(incident, scene, prometheus, evidence)
    left = await prometheus.until_quiet(QUIET_WITHIN_S, _LINGERS)
    others = await prometheus.fired(time.perf_counter() - began) - {*incident.alerts, *before}
    early = before.intersection(incident.alerts)
    return Result(incident, sorted(early), fired, sorted(others), sorted(left))


async def healthy(prometheus: Prometheus) -> dict[str, str]:
    """What fires in the healthy fleet, with caches that have been filled."""
    await asyncio.sleep(HEALTHY_S)
    return await prometheus.until_quiet(QUIET_WITHIN_S)


async def _run(incidents: Sequence[Incident], evidence: Path | None) -> int:
    began, wrong = time.perf_counter(), 0
    async with open_scene() as (scene, prometheus):
        firing = await healthy(prometheus)
        wrong += len(firing)
        print(f"healthy: {firing or 'no alert'}", flush=True)
        for incident in incidents:
            result = await play(incident, scene, prometheus, evidence)
            fired = ", ".join(f"{name} after {seconds:.0f} s" for name, seconds in result.fired_s.items())
            print(f"{incident.name}: {fired or 'nothing'}", flush=True)
            for label, names in (
                ("also", result.others),
                ("BEFORE THE FAULT", result.early),
                ("NOT FIRED", result.missing),
                ("STILL", result.left),
            ):
                if names:
                    print(f"    {label}: {', '.join(names)}", flush=True)
            wrong += len(result.early) + len(result.missing) + len(result.left)
        rules = expressions_of(in_less_time(RULES.read_text(), RULES_SPEEDUP))
        measures = [one for one in rules if ">" not in one and "==" not in one]
        asked = dashboard_expressions() + measures
        without = [one for one in asked if not await prometheus.had_series(one)]
        if len(incidents) == len(INCIDENTS):  # some expressions have series in one incident only
            wrong += len(without)
        print(f"{len(asked) - len(without)} of {len(asked)} expressions had series", *without, sep="\n    ")
    print(f"{len(incidents)} incidents in {time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and return the exit code: 1 if an alert did not fire or end, or an expression had no series."""
    by_name = {one.name: one for one in INCIDENTS}
    parser = argparse.ArgumentParser(prog="incidents", description="Play incidents on a real fleet.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(by_name)}; default: all")
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="write what each tool shows into DIR")
    flags = parser.parse_args(arguments)
    if unknown := set(flags.names) - by_name.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such incident; there are {', '.join(by_name)}")
    if flags.evidence is not None:
        flags.evidence.mkdir(parents=True, exist_ok=True)
    chosen = [by_name[name] for name in flags.names] or list(INCIDENTS)
    try:
        return uvloop.run(until_signalled("incidents", _run(chosen, flags.evidence)))
    except (FleetError, HttpError) as error:
        print(f"incidents: failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
