"""The same work in one run with kvrouter, nginx, vllm-router, sglang-router and Dynamo's frontend.

Missing programs are listed; --install installs them if they are on PyPI. nginx comes from the
system (apt-get install nginx-light). Figures are compared as ratios, as a disturbance affects all programs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.relay import add_measuring_flags
from scripts.kit.bench.wire import chat, installs, routers, tables
from scripts.kit.bench.wire.rounds import Contender, Results, run_rounds, warm
from scripts.kit.bench.wire.stage import Stage, contender, direct, open_stage
from scripts.kit.bench.wire.tables import tools_line, work_table
from scripts.kit.bench.wire.targets import target_table, targets
from scripts.kit.bench.wire.works import raise_descriptor_limit, standard_works
from scripts.kit.figures import MachineTime

WARM_CHATS = 64
CHATS = 320


async def run(flags: argparse.Namespace) -> int:
    _find(flags)
    raise_descriptor_limit()
    before = MachineTime.now()
    async with open_stage() as stage:
        results = await _side_by_side(stage, flags)
        chats = await _chats(stage, flags)
    results = Results(flags.runs, results.medians | chats.medians, results.ratios)
    rows, works = targets(results), standard_works()
    about = machine(before) | {"runs": flags.runs, "chat_runs": flags.chat_runs, "share": flags.share}
    about |= {"versions": _versions(flags), "missing": flags.missing}
    shown = [work_table(work, tables.names(results), results) for work in works]
    shown += [tables.chat_table(results), target_table(rows)]
    figures = {"results": tables.as_json(results), "targets": [row.as_json() for row in rows]}
    conclude(flags, shown, about, **figures)
    print(*(f"missing: {name}" for name in flags.missing), tools_line(works, results), sep="\n")
    return 0


def _find(flags: argparse.Namespace) -> None:
    """Set the programs that there are, and `missing`: the others, with how to install them."""
    for peer in installs.PEERS if flags.install else ():
        if peer.find() is None:
            print(f"installing {peer.name}", file=sys.stderr)
            installs.install(peer)
    flags.nginx = routers.find_nginx(flags.nginx)
    flags.vllm_router, flags.sglang_router = installs.VLLM_ROUTER.find(), installs.SGLANG_ROUTER.find()
    flags.dynamo = installs.DYNAMO.find()
    found = {
        "nginx (apt-get install nginx-light, or --nginx PATH)": flags.nginx,
        "vllm-router (--install)": flags.vllm_router,
        "sglang-router (--install)": flags.sglang_router,
        "Dynamo (--install)": flags.dynamo,
    }
    flags.missing = [name for name, program in found.items() if program is None]


async def _side_by_side(stage: Stage, flags: argparse.Namespace) -> Results:
    workers = await stage.workers(pace_ms=5)
    contenders = await stage.both_modes(workers, flags.against)
    if flags.nginx:
        contenders.append(await stage.nginx(workers, flags.nginx))
    if haproxy := shutil.which("haproxy"):
        contenders.append(await stage.haproxy(workers, Path(haproxy)))
    for policy in flags.policies:
        if program := flags.vllm_router:
            router = await routers.start_vllm_router(stage.fleet, program, workers, policy)
            contenders.append(contender(router))
        if program := flags.sglang_router:
            router = await routers.start_sglang_router(stage.fleet, program, workers, policy)
            contenders.append(contender(router))
    contenders.append(direct(workers))
    works = standard_works(flags.share)
    await warm(contenders, works, stage.directory)
    results = await run_rounds(contenders, lambda: works, flags.runs, stage.directory)
    for each in contenders[:-1]:
        await stage.stop_group(each.group)
    return results


async def _chats(stage: Stage, flags: argparse.Namespace) -> Results:
    if not flags.chat_runs:
        return Results(0, {})
    prompts = chat.Prompts(stage.model_path)
    contenders: list[Contender] = [await chat.start_ours(stage)]
    if flags.dynamo:
        contenders.append(await chat.start_dynamo(stage, flags.dynamo, prompts))
    await warm(contenders, [chat.chat_work(prompts, WARM_CHATS)], stage.directory)
    count = max(chat.CONCURRENCY, round(CHATS * flags.share))
    return await run_rounds(
        contenders, lambda: [chat.chat_work(prompts, count)], flags.chat_runs, stage.directory,
    )  # fmt: skip


def _versions(flags: argparse.Namespace) -> dict[str, str]:
    versions = {peer.name: peer.version for peer in installs.PEERS if peer.find()}
    if flags.nginx:
        version = subprocess.run([str(flags.nginx), "-v"], capture_output=True, text=True, check=False).stderr
        versions["nginx"] = version.strip().rpartition("/")[2]
    return versions


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_measuring_flags(parser)
    add = parser.add_argument
    add("--nginx", type=Path, metavar="PATH", help="the program (default: the one on PATH)")
    add("--chat-runs", type=int, default=3, metavar="N",
        help="rounds with chats, for kvrouter and Dynamo; 0: none (%(default)s)")  # fmt: skip
    add("--policies", nargs="+", default=["round_robin"], metavar="NAME",
        help="policy of vllm-router and sglang-router: round_robin, cache_aware (round_robin)")  # fmt: skip
    add("--install", action="store_true",
        help=f"first install what is missing, in {installs.cache_directory()}")  # fmt: skip
