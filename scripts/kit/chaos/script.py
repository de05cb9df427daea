"""Faults against real processes under load: failures, time until replicas agree again, leftovers.

Three replicas, four simulated engines with their agents, one nats-server, and requests at a fixed
rate. One fault after the other, all on the same fleet. --alerts: instead, faults that a real Prometheus must
notice, on a fleet of five engines and a NATS cluster; failed requests are then no failure of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
from rich.console import Console

from kvrouter.core.wire.heartbeats import PEER
from kvrouter.lab.simulate.traces import TraceError
from kvrouter.observe.verify import VerifyError, compare
from kvrouter.version import __version__
from scripts.kit import proxies
from scripts.kit.chaos import incidents
from scripts.kit.chaos.faults import (
    KEPT,
    KEPT_REPLAY_BUFFER,
    LATE,
    MOVES,
    ROWS,
    SHORT_REPLAY_BUFFER,
    Row,
    state_file,
)
from scripts.kit.chaos.halves import DECODES, LEASE_S, PREFILLS
from scripts.kit.chaos.judge import RowResult, judge, table
from scripts.kit.chaos.stage import Stage, open_stage
from scripts.kit.deployment import Plan
from scripts.kit.load import LoadRequest, SteadyLoad
from scripts.kit.prometheus import has_prometheus
from scripts.kit.script import ScriptError, new_console, run
from scripts.kit.workload import load_requests

NAMESPACE = "chaos"
REPLICAS, ENGINES = 3, 4
RATE = 10.0
LEAD_S = 3.0
# Shortens the trace's answers to streams of about a second; with fewer, a fault would meet none.
OUTPUT_DIVISOR = 2
NUM_BLOCKS = 4096
REPEATED = 70
NO_HAPROXY = f"HAProxy is not installed: {proxies.HAPROXY.how_to_get} (only this row needs it)"


NO_PROMETHEUS = "Prometheus is not installed: apt-get install prometheus (only rows with alerts need it)"


class BrokenPromiseError(ScriptError):
    """The run is complete, but a row of its table failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all or the selected rows; exit code 0 only if all of them passed."""
    options = _options(arguments)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR)
        # only errors: faults stop NATS, and every reconnection would be logged
    )
    return run("chaos", _run(options), TraceError, VerifyError)


async def _run(options: argparse.Namespace) -> int:
    console = new_console()
    started = time.monotonic()
    rows = [row for row in ROWS if row.name in options.only]
    if not rows:
        rows = [row for row in ROWS if bool(row.alerts) == options.alerts]
    results = []
    for (on_cluster, has_alerts, split), same in itertools.groupby(
        rows, lambda row: (row.on_cluster, bool(row.alerts), row.split)
    ):
        if has_alerts:
            results += await _run_watched(console, list(same))
        else:
            plans = {"": _plan, PEER: _peers_plan, MOVES: _moves_plan}
            plan_of = plans.get(split) or partial(_split_plan, split)
            results += await _run_stage(console, list(same), options.rate, plan_of, on_cluster=on_cluster)
    _show(console, results, options, time.monotonic() - started)
    if not all(result.holds for result in results):
        raise BrokenPromiseError("a row failed, see above")
    return 0


async def _run_stage(
    console: Console,
    rows: Sequence[Row],
    rate: float,
    plan_of: Callable[[Path], Plan],
    *,
    on_cluster: bool,
) -> list[RowResult]:
    """The rows of one fleet."""
    nats = "three NATS servers with a leaf node" if on_cluster else "NATS"
    console.print(f"starting {nats}, {ENGINES} engines with their agents, and {REPLICAS} replicas")
    async with open_stage("chaos", plan_of, on_cluster=on_cluster) as stage:
        requests = load_requests(700, output_divisor=OUTPUT_DIVISOR)
        if rows[0].split == PEER:  # prompts come again, and each has most of a cache's blocks for itself
            requests = load_requests(REPEATED, output_divisor=10 * OUTPUT_DIVISOR) * (700 // REPEATED)
        return [await _run_row(console, stage, row, requests, rate) for row in rows]


async def _run_watched(console: Console, rows: Sequence[Row]) -> list[RowResult]:
    """The rows with alerts, on a separate fleet."""
    if not has_prometheus():
        return [RowResult(row.name, row.what, skipped=NO_PROMETHEUS) for row in rows]
    results = []
    async with open_stage("chaos", incidents.plan_of, on_cluster=True) as bare:
        stage = await incidents.watched(bare)
        assert stage.prometheus is not None
        rate = incidents.REQUESTS_PER_SECOND
        async with SteadyLoad(incidents.requests(), stage.urls, rate=rate) as load:
            firing = await incidents.healthy(stage.prometheus)
            results.append(_watched_result("healthy", "no fault", problems=[*firing.values()]))
            for row in rows:
                console.print(f"[bold]{row.name}[/]: {row.what}", highlight=False)
                damage = await row.fault(stage, load)
                for text in damage.notes:
                    console.print(f"  {text}", highlight=False)
                results.append(_watched_result(row.name, row.what, damage.notes, damage.problems))
            if len(rows) == len(incidents.INCIDENTS):  # some expressions have series in one incident only
                empty = await incidents.without_series(stage.prometheus)
                results.append(_watched_result("series", "every expression had one", problems=empty))
    return results


def _watched_result(
    name: str, what: str, notes: Sequence[str] = (), problems: Sequence[str] = ()
) -> RowResult:
    return RowResult(name, what, clean_after_s=0.0, notes=notes, problems=problems)


def _plan(directory: Path) -> Plan:
    return Plan(
        "kv",
        directory / "model",
        engines=ENGINES,
        replicas=REPLICAS,
        num_blocks=NUM_BLOCKS,
        namespace=NAMESPACE,
        frontend_flags=("--drain-grace-s=2",),
        mocker_flags={
            KEPT: (f"--replay-buffer={KEPT_REPLAY_BUFFER}",),
            LATE: (f"--replay-buffer={SHORT_REPLAY_BUFFER}",),
        },
        agent_flags={KEPT: (f"--state-file={state_file(directory)}",)},
    )


def _split_plan(connector: str, directory: Path) -> Plan:
    """Two prefill and two decode workers. Any prompt with more than 64 uncached tokens is handed over."""
    roles = {**dict.fromkeys(PREFILLS, "prefill"), **dict.fromkeys(DECODES, "decode")}
    flags = {number: (f"--role={role}", f"--kv-connector={connector}") for number, role in roles.items()}
    lease = {number: (*of, f"--kv-lease-s={LEASE_S:g}") for number, of in flags.items()}
    return replace(
        _plan(directory),
        frontend_flags=("--drain-grace-s=2", "--pd-min-uncached-tokens=64"),
        mocker_flags=lease,
        agent_flags={number: (*of, "--bootstrap-port={port}") for number, of in flags.items()},
    )


def _moves_plan(directory: Path) -> Plan:
    """A stream may lose each of its workers."""
    return replace(_plan(directory), frontend_flags=("--drain-grace-s=2", f"--migration-limit={ENGINES}"))


def _peers_plan(directory: Path) -> Plan:
    """Four workers of whole requests. A mocker gives blocks on its port of HTTP."""
    connector = f"--kv-connector={PEER}"
    return replace(
        _plan(directory),
        num_blocks=NUM_BLOCKS // 2,
        frontend_flags=("--drain-grace-s=2", "--kv-from-peers"),
        # slow, so that the one that holds a prompt may be busy
        mocker_flags=dict.fromkeys(range(ENGINES), (connector, "--speedup=0.1")),
        agent_flags=dict.fromkeys(range(ENGINES), (connector, "--kv-address=127.0.0.1:{port}")),
    )


async def _run_row(
    console: Console, stage: Stage, row: Row, requests: Sequence[LoadRequest], rate: float
) -> RowResult:
    urls = stage.urls
    if row.behind_haproxy:
        binary = proxies.HAPROXY.find()
        if binary is None:
            console.print(f"[yellow]{row.name}: skipped:[/] {NO_HAPROXY}")
            return RowResult(row.name, row.what, skipped=NO_HAPROXY)
        urls = [await proxies.start(proxies.HAPROXY, binary, stage.fleet, stage.client, urls)]
    console.print(f"[bold]{row.name}[/]: {row.what}", highlight=False)
    async with SteadyLoad(requests, urls, rate=rate) as load:
        await asyncio.sleep(LEAD_S)
        before = await compare(stage.admin_urls, timeout_s=10.0)
        repairs = await stage.repairs()
        damage = await row.fault(stage, load)
        clean_after_s, unclean = await stage.until_clean(damage)
        await load.stop()
    expected, unexpected = judge(load.outcomes, damage.excuses)
    repaired = await stage.repairs() - repairs
    notes = [
        *damage.notes,
        "feeds: " + (", ".join(f"{n} {what}" for what, n in repaired.items()) or "no repair"),
    ]
    if row.engine is not None:
        notes.append(f"after: {await stage.index_share(row.engine)}")
    leftovers = await stage.leftovers()
    problems = [*damage.problems, *(f"before the fault: {text}" for text in before.differences)]
    if row.loses_nothing and row.engine is not None and (missing := await stage.missing_blocks(row.engine)):
        problems.append(f"{missing} blocks of the engine are no longer published")
    result = RowResult(
        row.name,
        row.what,
        len(load.outcomes),
        expected,
        unexpected,
        clean_after_s,
        unclean,
        leftovers,
        notes,
        problems,
        worst_ttft_s=max((outcome.ttft_s or 0.0 for outcome in load.outcomes), default=0.0),
    )
    for text in notes:
        console.print(f"  {text}", highlight=False)
    return result


def _show(
    console: Console, results: Sequence[RowResult], options: argparse.Namespace, seconds: float
) -> None:
    console.print(table(results))
    for result in results:
        for reason in [] if result.skipped else result.reasons():
            console.print(f"[bold red]{result.name}:[/] {reason}", highlight=False, soft_wrap=True)
    console.print(f"{options.rate:g} requests/s, {seconds:.0f} s in all", highlight=False)
    if options.json is not None:
        body = {
            "version": __version__,
            "rate": options.rate,
            "seconds": seconds,
            "passed": all(result.holds for result in results),
            "rows": [result.as_json() for result in results],
        }
        options.json.write_text(json.dumps(body, indent=2) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.split("\n", maxsplit=1)[0])
    names = [row.name for row in ROWS]
    parser.add_argument(
        "--only", action="append", default=[], choices=names, help="run only this row; repeatable"
    )
    parser.add_argument(
        "--alerts", action="store_true", help="the rows that a Prometheus must notice; 12 min"
    )
    parser.add_argument("--rate", type=float, default=RATE, metavar="N", help="requests/s (%(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    flags = parser.parse_args(arguments)
    if not 0 < flags.rate <= 1000:
        parser.error(f"--rate {flags.rate:g}: use more than 0 and at most 1000 requests/s")
    return flags
