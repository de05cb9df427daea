"""The demo: two replicas, four simulated engines, one NATS, and a real trace; round-robin against kv."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvrouter.core.wire.hashes import prompt_hashes
from kvrouter.simulate.engines import Arrival
from kvrouter.simulate.report import Possible
from kvrouter.simulate.traces import (
    CONVERSATION_EXCERPT,
    SHORT_EXCERPT,
    TRACE_ID_TOKENS,
    Prompts,
    Scaling,
    TraceError,
    read_trace,
    scaled,
    spread,
)
from kvrouter.tokens.tiny import VOCABULARY_SIZE, build_tiny_model
from scripts.kit import deployment, report
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.figures import MachineTime, figures
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client, HttpError
from scripts.kit.load import LoadRequest, Outcome, run_load
from scripts.kit.replicas import settled
from scripts.kit.script import log_directory, new_console, until_signalled

MODEL = "mock"
REQUESTS = 640
SECONDS_PER_REQUEST = 35.0 / REQUESTS
TOKENS_PER_ID = 64
OUTPUT_DIVISOR = 8
REQUEST_TIMEOUT_S = 30.0
# Blocks of an engine's cache: three quarters of what round-robin would fill, so that engines must evict.
NUM_BLOCKS = 12_288
BLOCK_SIZE = 16


class FailedError(Exception):
    """The demo ran, but its result failed a check."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    requests: int
    keep: bool
    json: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    options = _options(arguments)
    try:
        return uvloop.run(until_signalled("demo", _run(options)))
    except (FailedError, FleetError, HttpError, TraceError) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1


async def _run(options: Options) -> int:
    console = new_console()
    requests = load_requests(options.requests)
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(log_directory("demo"))
        client = Client()
        stack.callback(client.close)
        fleet = await stack.enter_async_context(Fleet(directory))
        console.print("starting NATS, and building a tiny model directory")
        nats_url = await deployment.start_nats(fleet, client)
        build_tiny_model(directory / "model")
        stage = Stage(console, fleet, client, nats_url, directory / "model")
        plain, deployed = await stage.measure("round-robin", requests)
        await deployment.stop(fleet, deployed)
        kv, deployed = await stage.measure("kv", requests)
        possible = _possible(requests, len(deployed.engines))
        report.show(console, plain, kv, possible, _caption(options.requests))
        if options.json is not None:
            about = {
                "scaling": asdict(_scaling(options.requests)),
                "achievable_rate": possible.endless,
                "pooled_rate": possible.pooled,
            }
            report.write_json(options.json, plain, kv, about)
        if options.keep:
            await _keep(console, fleet, deployed)
        if report.problems(plain, kv):
            raise FailedError("see above")
        return 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Shared by all modes."""

    console: Console
    fleet: Fleet
    client: Client
    nats_url: str
    model_path: Path

    async def measure(
        self, mode: str, requests: Sequence[LoadRequest]
    ) -> tuple[report.ModeResult, Deployment]:
        """Deploy with cold caches, replay the trace, and read the replicas' final state."""
        namespace = f"demo-{mode}"
        plan = Plan(mode, self.model_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, namespace=namespace)
        self.console.print(f"[bold]{mode}[/]: starting 4 engines with their agents, and 2 replicas")
        deployed = await deployment.deploy(self.fleet, self.client, plan, self.nats_url)
        before = MachineTime.now()
        outcomes = await self._replay(mode, requests, [replica.url for replica in deployed.replicas])
        after = MachineTime.now()
        self.fleet.check()
        busy = after.busy_since(before) if before and after else None
        views = await settled(deployed.replicas)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        return report.ModeResult(mode, figures(outcomes), views, busy, failed), deployed

    async def _replay(self, mode: str, requests: Sequence[LoadRequest], urls: list[str]) -> list[Outcome]:
        columns = (
            TextColumn(f"[bold]{mode}[/]: replaying"),
            BarColumn(), MofNCompleteColumn(), TextColumn("answers"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console, refresh_per_second=4) as progress:
            bar = progress.add_task(mode, total=len(requests))
            return await run_load(
                requests,
                urls,
                request_timeout_s=REQUEST_TIMEOUT_S,
                time_limit_s=requests[-1].at_s + REQUEST_TIMEOUT_S,
                on_done=lambda _outcome: progress.advance(bar),
            )


def load_requests(count: int, *, output_divisor: int = OUTPUT_DIVISOR) -> list[LoadRequest]:
    """The first `count` requests of the excerpt, scaled, as streaming completions of token ids."""
    scaling = replace(_scaling(count), output_divisor=output_divisor)
    trace = spread(scaled(read_trace(CONVERSATION_EXCERPT, count), scaling))
    prompts = Prompts(tokens_per_id=TOKENS_PER_ID, vocabulary_size=VOCABULARY_SIZE)
    return [
        LoadRequest(
            at_s=request.arrival_s,
            body=_body(prompts.token_ids(request), request.output_tokens),
            output_tokens=request.output_tokens,
        )
        for request in trace
    ]


def _scaling(count: int) -> Scaling:
    return Scaling(TOKENS_PER_ID, OUTPUT_DIVISOR, duration_s=count * SECONDS_PER_REQUEST)


def _body(prompt: list[int], output_tokens: int) -> bytes:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _possible(requests: Sequence[LoadRequest], engines: int) -> Possible:
    """What caches that all engines share would have had."""
    prompts = [json.loads(request.body)["prompt"] for request in requests]
    arrivals = [Arrival(0.0, prompt_hashes(prompt, BLOCK_SIZE), len(prompt), 0) for prompt in prompts]
    return Possible.of(arrivals, engines * NUM_BLOCKS, block_size=BLOCK_SIZE)


def _caption(count: int) -> str:
    scaling = _scaling(count)
    return (
        f"Mooncake conversation trace (FAST'25), first {count} requests, open loop, streamed through 2"
        f" replicas in turn to 4 simulated engines of {NUM_BLOCKS:,} blocks. Scaled alike for both: one hash"
        f" id = {TOKENS_PER_ID} tokens instead of {TRACE_ID_TOKENS}, outputs ÷ {OUTPUT_DIVISOR}, arrivals"
        f" in {scaling.duration_s:.0f} s (the trace's 3 s steps spread evenly). Caches cold at each start."
        " Possible: what one endless cache, shared by all engines, would have; pooled: one of their size;"
        " best engines: if each request had gone where most of its prompt was cached."
    )


async def _keep(console: Console, fleet: Fleet, deployed: Deployment) -> None:
    """Leave the kv fleet running until Ctrl-C or the end of one of its processes."""
    replicas, engines = deployed.replicas, deployed.engines
    lines = ["", "still running, until Ctrl-C:"]
    lines += [
        f"  replica {n}  {replica.url}  (/metrics /ready), {replica.admin_url}  (/workers /decisions)"
        for n, replica in enumerate(replicas)
    ]
    lines += [f"  engine {n}   {engine.url}" for n, engine in enumerate(engines)]
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


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument(
        "--requests",
        type=int,
        default=REQUESTS,
        metavar="N",
        help="number of requests, 2 to 700 (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--keep", action="store_true", help="leave the kv fleet running until Ctrl-C")
    flags = parser.parse_args(arguments)
    if not 2 <= flags.requests <= SHORT_EXCERPT:
        parser.error(f"--requests {flags.requests}: the excerpt has 700 requests, and both replicas need one")
    return Options(flags.requests, flags.keep, flags.json)


if __name__ == "__main__":
    sys.exit(main())
