"""The demo: chats about shared documents through two replicas to four simulated engines, in three modes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvrouter.core.wire.hashes import prompt_hashes
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.report import Possible
from scripts.kit import report
from scripts.kit.deployment import Deployment, Plan, Stage, open_stage
from scripts.kit.figures import MachineTime, figures
from scripts.kit.fleet import Fleet
from scripts.kit.load import LoadRequest, Outcome, run_load
from scripts.kit.replicas import settled
from scripts.kit.script import ScriptError, new_console, run
from scripts.kit.workload import MODEL, Chats

MODES = ("round-robin", "least-loaded", "kv")
REQUESTS = 560
REQUESTS_PER_SECOND = 20.0
MOST_REQUESTS = 2_000
REQUEST_TIMEOUT_S = 30.0
ENGINES = 4
BLOCK_SIZE = 16
# Blocks of an engine's cache: all engines together hold every document and chat once, one engine a third.
NUM_BLOCKS = 2_048
# Half as fast as Llama-3-8B on an H100: then prefill is what users wait for, not this machine.
SPEEDUP = 0.5


class FailedError(ScriptError):
    """The demo ran, but its result failed a check."""


def main(arguments: Sequence[str] | None = None) -> int:
    return run("demo", _run(_flags(arguments)))


async def _run(flags: argparse.Namespace) -> int:
    console = new_console()
    if flags.split:
        return await _split(console)
    chats = Chats(flags.requests, flags.requests / REQUESTS_PER_SECOND)
    requests = chats.drawn()
    async with open_stage("demo") as stage:
        console.print(_about(chats), highlight=False)
        results: list[report.ModeResult] = []
        for mode in MODES:
            result, deployed = await measure(console, stage, mode, requests)
            results.append(result)
            if mode != MODES[-1]:
                await stage.stop(deployed)
        possible = Possible.of(arrivals(requests), ENGINES * NUM_BLOCKS, block_size=BLOCK_SIZE)
        report.show(console, results, possible)
        if flags.json is not None:
            about = {"workload": asdict(chats), "achievable_rate": possible.endless}
            report.write_json(flags.json, results, about | {"pooled_rate": possible.pooled})
        if flags.html is not None:
            report.write_html(flags.html, results, possible, _about(chats))
            console.print(f"plots: {flags.html}", highlight=False)
        if flags.keep:
            await _keep(console, stage.fleet, deployed)
        else:
            console.print(_NEXT, highlight=False, markup=False)
        if report.problems(results):
            raise FailedError("see above")
        return 0


async def _split(console: Console) -> int:
    """Prefill and decode apart, until Ctrl-C."""
    async with open_stage("demo") as stage:
        roles = ["prefill", "decode"] * (ENGINES // 2)
        flags = {number: (f"--role={role}", "--kv-connector=nixl") for number, role in enumerate(roles)}
        plan = Plan("kv", stage.model_path, engines=ENGINES, speedup=SPEEDUP, mocker_flags=flags)
        await _keep(console, stage.fleet, await stage.deploy(plan), roles)
    return 0


async def measure(
    console: Console, stage: Stage, mode: str, requests: Sequence[LoadRequest], speedup: float = SPEEDUP
) -> tuple[report.ModeResult, Deployment]:
    """Deploy with cold caches, send the requests, and read the replicas' final state.

    `mode` may have a weight: `kv:1`.
    """
    name, _, weight = mode.partition(":")
    plan = Plan(
        name, stage.model_path, engines=ENGINES, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
        speedup=speedup, namespace=f"demo-{name}-{weight}",
        frontend_flags=(f"--kv-overlap-score-weight={weight}",) if weight else (),
    )  # fmt: skip
    deployed = await stage.deploy(plan)
    before = MachineTime.now()
    outcomes = await _send(console, mode, requests, [replica.url for replica in deployed.replicas])
    after = MachineTime.now()
    stage.fleet.check()
    busy = after.busy_since(before) if before and after else None
    views = await settled(deployed.replicas)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    times = [one.ttft_s for one in outcomes if one.error is None and one.ttft_s is not None]
    return report.ModeResult(mode, figures(outcomes), views, busy, failed, times), deployed


async def _send(
    console: Console, mode: str, requests: Sequence[LoadRequest], urls: list[str]
) -> list[Outcome]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("answers"), TimeRemainingColumn())
    with Progress(TextColumn(f"{mode:12}"), *columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task(mode, total=len(requests))
        return await run_load(
            requests,
            urls,
            request_timeout_s=REQUEST_TIMEOUT_S,
            time_limit_s=requests[-1].at_s + REQUEST_TIMEOUT_S,
            on_done=lambda _outcome: progress.advance(bar),
        )


def arrivals(requests: Sequence[LoadRequest]) -> list[Arrival]:
    """The same requests for the simulator."""
    prompts = [json.loads(request.body)["prompt"] for request in requests]
    return [
        Arrival(request.at_s, prompt_hashes(prompt, BLOCK_SIZE), len(prompt), request.output_tokens or 1)
        for request, prompt in zip(requests, prompts, strict=True)
    ]


def _about(chats: Chats) -> str:
    least, most = chats.document_tokens
    return (
        f"{chats.requests} requests of generated chats about {chats.documents} documents of {least:,} to "
        f"{most:,} tokens, {REQUESTS_PER_SECOND:g} a second through 2 replicas to {ENGINES} simulated "
        "engines, whose caches hold a third of it each and are empty at each start"
    )


_NEXT = """
next:
  scripts/demo --keep         leaves the fleet running, and prints a curl to try
  scripts/demo --html FILE    plots of the same (scripts/setup installs Plotly)
  kvrouter serve --engine http://HOST:PORT …
                              in front of your own engines (README.md)
  kvrouter analyze TRACE      what your own traffic would gain (docs/analyze.md)"""


async def _keep(console: Console, fleet: Fleet, deployed: Deployment, roles: Sequence[str] = ()) -> None:
    """Leave the fleet running until Ctrl-C or the end of one of its processes."""
    replicas, engines = deployed.replicas, deployed.engines
    lines = ["", "still running, until Ctrl-C:"]
    lines += [
        f"  replica {n}  {replica.url}  (/metrics /ready), {replica.admin_url}  (/workers /decisions)"
        for n, replica in enumerate(replicas)
    ]
    for n, (engine, role) in enumerate(zip_longest(engines, roles)):
        lines.append(f"  engine {n}   {engine.url}{f'  ({role}, nixl)' if role else ''}")
    lines += [f"  NATS       {deployed.nats_url}", f"  logs       {fleet.directory}"]
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "model": MODEL})
    lines.append(
        f"  try        curl {replicas[0].url}/v1/chat/completions"
        f" -H 'content-type: application/json' -d '{body}'"
    )
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    ends = [asyncio.ensure_future(process.wait()) for process in fleet.processes.values()]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        return  # the normal end is Ctrl-C
    finally:
        for end in ends:
            end.cancel()
    fleet.check()


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=REQUESTS, metavar="N",
        help=f"number of requests, 2 to {MOST_REQUESTS} (%(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--html", type=Path, metavar="FILE", help="also write plots to FILE")
    add("--keep", action="store_true", help="leave the kv fleet running until Ctrl-C")
    add("--split", action="store_true", help="only start prefill and decode engines, until Ctrl-C")
    flags = parser.parse_args(arguments)
    if not 2 <= flags.requests <= MOST_REQUESTS:
        parser.error(f"--requests {flags.requests}: use 2 to {MOST_REQUESTS}; both replicas need one")
    if flags.html is not None and importlib.util.find_spec("plotly") is None:
        parser.error("--html needs Plotly: scripts/setup installs it")
    return flags
