"""A real prefill and a real decode engine behind `kvrouter serve`: tokens, blocks handed over, faults.

    scripts/test-vllm DIR --pd nixl|example

Each answer is compared with that of one engine alone; blocks are counted by the decode engine's own metrics.
nixl needs its library: DIR/venv/bin/python -m pip install --target DIR/nixl --no-deps nixl nixl-cu12
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.kit.deployment import Stage as Common
from scripts.kit.deployment import open_stage
from scripts.kit.engine_tests.adapters import write_weights
from scripts.kit.engine_tests.engines import (
    BLOCK_SIZE,
    Engine,
    EngineTest,
    find_program,
    start_engine,
    wait_until_up,
)
from scripts.kit.engine_tests.stage import Stage, serve_engines
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.script import ScriptError, new_console, run, table_of

LENGTHS = (1, 31, 32, 33, 64, 200, 700, 1500)
AT_ONCE = 8
OUTPUT_TOKENS = 12
_BYTES = re.compile(r"^vllm:nixl_bytes_transferred_sum(?:{[^}]*})? (\S+)", re.MULTILINE)
_HITS = re.compile(r"^vllm:external_prefix_cache_hits_total(?:{[^}]*})? (\S+)", re.MULTILINE)
# NixlConnector pins its threads to the machine's last core, so that two engines would share one.
_UNPIN = "import os\nos.sched_setaffinity = lambda *_: None\n"


class PairError(ScriptError):
    """Something was not as with one engine."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client got."""

    status: int
    text: str
    cached_tokens: int | None
    prefill_worker: str


async def ask(client: Client, url: str, prompt: Sequence[int], *, stream: bool = False) -> Reply:
    """A greedy completion."""
    body: dict[str, Any] = {"model": "tiny", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    received = bytearray()
    head = await client.send("POST", f"{url}/v1/completions", received.extend, json.dumps(body).encode())
    text, usage = "", dict[str, Any]()
    lines = received.decode().splitlines() if stream else [f"data: {received.decode()}"]
    for part in [json.loads(line[6:]) for line in lines if line.startswith("data: {")]:
        text += "".join(choice["text"] for choice in part.get("choices") or ())
        usage = part.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Reply(head.status, text, cached, head.headers.get("x-kvrouter-prefill-worker", ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; exit code 0 only if everything was as with one engine."""
    parser = argparse.ArgumentParser(prog="scripts/test-vllm DIR --pd", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("connector", choices=("nixl", "example"), nargs="?", default="nixl")
    return run("test-vllm", _run(parser.parse_args(arguments)))


async def _run(options: argparse.Namespace) -> int:
    console = new_console()
    program = find_program("vllm", options.directory)
    async with open_stage("test-vllm", starts_nats=False) as common:
        write_weights(common.model_path, 3)
        test = EngineTest("vllm", program, common.model_path, {}, 640, load_format="auto")
        engines = [await _start(common, test, options, role) for role in ("producer", "consumer")]
        for engine in engines:
            await wait_until_up(common.client, common.fleet.processes[engine.name], engine)
        named = [
            f"{engine.url},kv={engine.events},replay={engine.replay},role={role},connector={options.connector}"
            for engine, role in zip(engines, ("prefill", "decode"), strict=True)
        ]
        flags = ["--router-mode=kv", "--router-replica-sync", "--pd-min-uncached-tokens=0"]
        stage = await serve_engines(common.fleet, common.client, engines, named, flags)
        rows = [*await _lengths(stage), await _at_once(stage), *await _without_prefill(stage)]
        predictions = await _predictions(stage)
    console.print(
        table_of(f"a pair of vLLM engines, {options.connector}", ("request", "handed over", "seen"), rows)
    )
    console.print(predictions)
    return 0


async def _start(common: Common, test: EngineTest, options: argparse.Namespace, role: str) -> Engine:
    store, site = common.directory / "kv", common.directory / "site"
    for made in (store, site):
        made.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_UNPIN, "utf-8")
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_buffer_device": "cpu",
    }
    if options.connector == "example":
        extra = {"shared_storage_path": str(store)}
        config |= {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    environment = {
        "PYTHONPATH": f"{site}:{(options.directory / 'nixl').absolute()}",
        "UCX_TLS": "tcp,self,sm",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
    }
    number = ("producer", "consumer").index(role)
    flags = ["--kv-transfer-config", json.dumps(config)]
    return await start_engine(common.fleet, test, number, flags, environment)


async def _counts(stage: Stage) -> dict[str, float]:
    _, text = await stage.client.get(f"{stage.engines[1].url}/metrics")
    found = {"bytes": _BYTES, "tokens": _HITS}
    return {name: sum(map(float, each.findall(text.decode()))) for name, each in found.items()}


async def _lengths(stage: Stage) -> list[tuple[str, str, str]]:
    """Prompts of many lengths, whole and streamed, at both replicas in turn."""
    rng, rows = random.Random(1), []
    for number, (length, stream) in enumerate((each, flag) for each in LENGTHS for flag in (False, True)):
        prompt = [rng.randrange(5, 1900) for _ in range(length)]
        before = await _counts(stage)
        reply = await ask(stage.client, stage.replicas[number % 2].url, prompt, stream=stream)
        after = await _counts(stage)
        _check(reply, await ask(stage.client, stage.engines[0].url, prompt), f"{length} tokens")
        if not reply.prefill_worker or reply.cached_tokens != 0:
            raise PairError(f"{length} tokens: not handed over, or usage is not that of the prefill: {reply}")
        blocks = -(-length // BLOCK_SIZE)
        seen = (
            f"{after['bytes'] - before['bytes']:,.0f} bytes, {after['tokens'] - before['tokens']:.0f} tokens"
        )
        form = "streamed" if stream else "whole"
        rows.append((f"{length:,} tokens, {form}", f"{blocks} blocks", f"equal; {seen}"))
    await stage.until_equal()
    return rows


async def _at_once(stage: Stage) -> tuple[str, str, str]:
    rng = random.Random(2)
    prompts = [[rng.randrange(5, 1900) for _ in range(250)] for _ in range(AT_ONCE)]
    replies = await asyncio.gather(
        *[ask(stage.client, stage.replicas[0].url, one, stream=True) for one in prompts]
    )
    for prompt, reply in zip(prompts, replies, strict=True):
        _check(reply, await ask(stage.client, stage.engines[0].url, prompt), "at once")
    return f"{AT_ONCE} at once", f"{AT_ONCE} prompts", "equal"


async def _without_prefill(stage: Stage) -> list[tuple[str, str, str]]:
    """The prefill engine is killed while it computes, and is gone after that."""
    rng, client, url = random.Random(3), stage.client, stage.replicas[0].url
    prompts = [[rng.randrange(5, 1900) for _ in range(1500)] for _ in range(4)]
    alone = [await ask(client, stage.engines[0].url, prompt) for prompt in prompts]
    asking = [asyncio.create_task(ask(client, url, prompt, stream=True)) for prompt in prompts[:2]]
    await asyncio.sleep(0.1)
    await stage.fleet.processes[stage.engines[0].name].kill()
    for reply, expected in zip(await asyncio.gather(*asking), alone[:2], strict=True):
        _check(reply, expected, "prefill engine killed meanwhile")
    for prompt, expected in zip(prompts[2:], alone[2:], strict=True):
        _check(await ask(client, url, prompt), expected, "prefill engine gone")
    return [("prefill engine killed meanwhile", "", "equal"), ("prefill engine gone", "", "equal")]


async def _predictions(stage: Stage) -> str:
    """Raises PairError if one was wrong."""
    found: dict[str, float] = {}
    for replica in stage.replicas:
        _, text = await stage.client.get(f"{replica.url}/metrics")
        for result, count in re.findall(
            r'kvrouter_predictions_total{[^}]*result="(\w+)"[^}]*} (\S+)', text.decode()
        ):
            found[result] = found.get(result, 0.0) + float(count)
    if found.keys() != {"exact"}:
        raise PairError(f"predictions: {found}")
    return f"predictions of prompts: {found['exact']:.0f} exact"


def _check(reply: Reply, alone: Reply, what: str) -> None:
    if reply.status != 200 or reply.text != alone.text:
        raise PairError(f"{what}: {reply.status}, {reply.text!r} instead of {alone.text!r}")


if __name__ == "__main__":
    raise SystemExit(main())
