"""Predicted overlap against the cached tokens that two real engines report, behind `kvrouter serve`.

One request at a time, to two replicas in turn; then one engine is killed, requests go on with the
other, it is restarted, and the remaining requests follow.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from rich.console import Console

from scripts.kit.deployment import open_stage
from scripts.kit.engine_tests.answers import Sample, ask
from scripts.kit.engine_tests.engines import BLOCK_SIZE, Kind, counting_evictions, find_program
from scripts.kit.engine_tests.report import Report, table
from scripts.kit.engine_tests.stage import ENGINES, Stage, prepare, set_up
from scripts.kit.engine_tests.workload import Request, Workload
from scripts.kit.script import ScriptError, new_console, run

# Per engine. All kinds and groups need more than 1,000, so both engines evict.
NUM_BLOCKS = 160
WANTED_SHARE = 0.99
DOWN_REQUESTS = 10
_FEWEST_REQUESTS = 3 * DOWN_REQUESTS


class WrongPredictionsError(ScriptError):
    """The run is complete, but too many predictions were wrong."""


@dataclass(slots=True)
class Trial:
    """The requests sent so far and their samples."""

    stage: Stage
    workload: Workload
    samples: list[Sample] = field(default_factory=list)
    _requests: Iterator[Request] = field(init=False)

    def __post_init__(self) -> None:
        self._requests = iter(self.workload)

    async def send(self, count: int, phase: str) -> None:
        """Send requests one at a time, each after the events of the former one are in every index."""
        for _ in range(count):
            request, number = next(self._requests), len(self.samples) + 1
            turn = number if request.chain is None else request.chain
            replica = self.stage.replicas[turn % len(self.stage.replicas)]
            answer = await ask(self.stage.client, replica.url, request)
            self.samples.append(answer.sample(number, phase, request, BLOCK_SIZE))
            self.workload.add_answer(request, answer.text, answer.response_id)
            await self.stage.until_equal()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; exit code 0 only if at least 99 % of the predictions were exact."""
    options = _options(arguments)
    return run(f"test-{options.kind}", _run(options))


async def _run(options: argparse.Namespace) -> int:
    console = new_console()
    program = find_program(options.kind, options.directory)
    started = time.monotonic()
    async with open_stage(f"test-{options.kind}", starts_nats=False) as common:
        test = prepare(common.directory, options.kind, program, NUM_BLOCKS)
        size = f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens"
        console.print(f"starting {ENGINES} {options.kind} engines, {size} each")
        stage = await set_up(common.fleet, common.client, test)
        console.print(
            stage.serve.log.read_text(errors="replace"), markup=False, highlight=False, soft_wrap=True
        )
        trial = Trial(stage, Workload(test.name, tuple(test.adapters), options.seed, options.kind))
        async with counting_evictions(options.kind, [engine.events for engine in stage.engines]) as evictions:
            await _send_all(console, trial, options.requests)
        took_s = time.monotonic() - started
        versions, with_ids = await _versions(stage, options.kind), await stage.chats_with_ids()
        report = Report(trial.samples, evictions.blocks, with_ids, versions, took_s)
    _show(console, report, options.json)
    if report.exact_share < WANTED_SHARE:
        raise WrongPredictionsError(f"only {report.exact_share:.1%} of the predictions were exact")
    return 0


async def _send_all(console: Console, trial: Trial, count: int) -> None:
    """Two thirds with both engines, a few with one engine killed, the rest with both again."""
    before = count * 2 // 3
    await trial.send(before, "both engines")
    victim = trial.stage.engines[-1]
    console.print(f"{before} requests answered; killing {victim.name}")
    await trial.stage.fleet.processes[victim.name].kill()
    trial.workload.forget_responses()
    await trial.send(DOWN_REQUESTS, "one engine")
    await trial.stage.start_again(victim)
    console.print(f"{victim.name} has restarted")
    await trial.send(count - before - DOWN_REQUESTS, "after its restart")


def _show(console: Console, report: Report, file: Path | None) -> None:
    console.print(*table(report), sep="\n")
    if file is not None:
        file.write_text(json.dumps(report.as_json(), indent=2) + "\n", "utf-8")


async def _versions(stage: Stage, kind: Kind) -> dict[str, str]:
    path = "version" if kind == "vllm" else "server_info"
    found = await stage.client.get_json(f"{stage.engines[0].url}/{path}")
    return {kind: found["version"], "python": sys.version.split()[0]}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-vllm (or test-sglang)", description=__doc__)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="made by --build DIR: it has the engine (docs/engines.md)"
    )
    parser.add_argument("--kind", choices=get_args(Kind), default="vllm", help="which engine (default: vllm)")
    parser.add_argument("--requests", type=int, default=420, help="number of requests (default: 420)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)
    if options.requests < _FEWEST_REQUESTS:
        parser.error(f"--requests {options.requests}: at least {_FEWEST_REQUESTS} are needed")
    return options
