"""A real prefill and a real decode engine behind `kvrouter serve`: tokens, blocks handed over, faults.

    scripts/test-vllm DIR --pd nixl|mooncake|example

Each answer is compared with one engine's alone; blocks are counted by the decode engine's own metrics.
The names in the engine's files are compared with the names in tests/connectors.
nixl and mooncake need their libraries in DIR/nixl and DIR/mooncake, as `scripts/test-vllm --build DIR` makes
them; mooncake also libibverbs1 (`apt-get install libibverbs1`, or its files in DIR/ibverbs), but no device.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

from kvrouter.connectors.nixl import ASKING, NEEDED
from scripts.kit.deployment import Stage as Common
from scripts.kit.deployment import open_stage
from scripts.kit.engine_events import FILE, hand_over_of
from scripts.kit.engine_tests import answers
from scripts.kit.engine_tests.adapters import write_weights
from scripts.kit.engine_tests.answers import Answer
from scripts.kit.engine_tests.between import Between, between
from scripts.kit.engine_tests.engines import (
    BLOCK_SIZE,
    Engine,
    EngineTest,
    find_program,
    start_engine,
    wait_until_up,
)
from scripts.kit.engine_tests.stage import Stage, serve_engines
from scripts.kit.engine_tests.workload import Request
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.script import ScriptError, new_console, run, table_of

LENGTHS = {
    **dict.fromkeys(("nixl", "mooncake"), (1, 31, 32, 33, 64, 200, 700, 1500)),
    # A vLLM 0.33 with ExampleConnector ends at a prompt of 1 token, or at the second of 33 tokens: it finds
    # fewer tokens than the engine has, and get_num_new_matched_tokens is below 0.
    "example": (2, 31, 32, 64, 100, 200, 700, 1500),
}
NUM_BLOCKS = 640
# The engine's lease is 30 s.
LEASE_TIMEOUT_S = 120
CHECKED_TIMEOUT_S, QUIET_S = 120, 6.0
AT_ONCE = 8
OUTPUT_TOKENS = 12
_BYTES = re.compile(r"^vllm:(?:nixl|mooncake)_bytes_transferred_sum(?:{[^}]*})? (\S+)", re.MULTILINE)
_EXPIRED = re.compile(r"^vllm:nixl_num_kv_expired_reqs_total(?:{[^}]*})? (\S+)", re.MULTILINE)
_FAILURES = re.compile(r"^kvrouter_pd_pair_failures_total (\S+)", re.MULTILINE)
_FALLBACKS = re.compile(r'^kvrouter_pd_requests_total\{path="fallback"} (\S+)', re.MULTILINE)
_ENDED = re.compile(r"^vllm:request_success_total(?:{[^}]*})? (\S+)", re.MULTILINE)
_HITS = re.compile(r"^vllm:external_prefix_cache_hits_total(?:{[^}]*})? (\S+)", re.MULTILINE)
# NixlConnector pins its threads to the machine's last core, so that two engines would share one.
# MooncakeConnector asks torch for the number of its accelerator, which raises where there is none.
_SITE = """
import os, sys
os.sched_setaffinity = lambda *_: None
class BeforeMooncake:
    def find_spec(self, name, path=None, target=None):
        if name == "mooncake" and "torch" in sys.modules:
            sys.modules["torch"].accelerator.current_device_index = lambda: 0
sys.meta_path.insert(0, BeforeMooncake())
"""


Row: TypeAlias = tuple[str, str, str]


class PairError(ScriptError):
    """Something was not as with one engine."""


async def ask(client: Client, url: str, prompt: Sequence[int], *, stream: bool = False) -> Answer:
    """A greedy completion."""
    body: dict[str, Any] = {"model": "tiny", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return await answers.ask(client, url, Request("", "/v1/completions", body, 0))


def is_handed(answer: Answer) -> bool:
    """Whether a prefill engine has computed the prompt."""
    return "x-kvrouter-prefill-worker" in answer.headers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; exit code 0 only if everything was as with one engine."""
    parser = argparse.ArgumentParser(prog="scripts/test-vllm DIR --pd", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("connector", choices=("nixl", "mooncake", "example"), nargs="?", default="nixl")
    return run("test-vllm", _run(parser.parse_args(arguments)))


async def _run(options: argparse.Namespace) -> int:
    console = new_console()
    program = find_program("vllm", options.directory)
    rows = [_names(program)]
    async with open_stage("test-vllm", starts_nats=False) as common, AsyncExitStack() as stack:
        write_weights(common.model_path, 3)
        test = EngineTest("vllm", program, common.model_path, {}, NUM_BLOCKS, load_format="auto")
        (port,) = free_ports(1)
        roles = ("producer", "consumer")
        engines = [await start_half(common, test, options, n, roles[n], port) for n in range(2)]
        await wait_until_up(common.client, common.fleet, engines)
        proxy = await stack.enter_async_context(between(engines[0].url))
        more = {"role": "prefill", "connector": options.connector, "bootstrap-port": f"{port}"}
        decode = engines[1].named(role="decode", connector=options.connector)
        named = [engines[0].named(proxy.url, **more), decode]
        flags = ["--router-mode=kv", "--router-replica-sync", "--pd-min-uncached-tokens=0"]
        stage = await serve_engines(common.fleet, common.client, engines, named, flags)
        await _until_checked(stage)
        rows += [*await _lengths(stage, options.connector), await _at_once(stage)]
        if options.connector == "nixl":
            rows += [await _wrong_engine(stage, proxy), await _lease_over(stage, proxy)]
        rows += await _without_prefill(stage, proxy)
        # under: a decode engine alone has read the other's files
        allowed = {"exact", "under"} if options.connector == "example" else {"exact"}
        seen = await predictions(stage, allowed)
    console.print(
        table_of(f"a pair of vLLM engines, {options.connector}", ("request", "handed over", "seen"), rows)
    )
    console.print(seen)
    return 0


def _names(program: Path) -> Row:
    """Raises PairError if the engine's files lack a name that kvrouter uses."""
    (site,) = program.parent.parent.glob("lib/python*/site-packages")
    found = hand_over_of(lambda path: (site / path).read_text("utf-8"))
    known = json.loads(FILE.read_bytes())["vllm"]
    used = {
        "nixl_reads": {*json.loads(bytes(ASKING)), *NEEDED},
        "nixl_answers": set(NEEDED),
        "mooncake_reads": {"transfer_id", "remote_engine_id", "remote_bootstrap_addr"},
        "connectors": {"NixlConnector", "MooncakeConnector", "ExampleConnector"},
    }
    for where, names in used.items():
        if lacking := names.difference(found[where]):
            raise PairError(f"{where}: this engine has no {', '.join(sorted(lacking))}")
    recorded = {(where, name) for where, names in known["hand_over"].items() for name in names}
    here = {(where, name) for where, names in found.items() for name in names}
    seen = f"{len(here - recorded)} more, {len(recorded - here)} fewer than in {known['version']}"
    return "names in the engine's files", "", seen


async def start_half(  # noqa: PLR0917
    common: Common, test: EngineTest, options: argparse.Namespace, number: int, role: str, bootstrap_port: int
) -> Engine:
    """Start an engine that hands blocks over by the connector of `options`: a producer or a consumer."""
    store, site = common.directory / "kv", common.directory / "site"
    for made in (store, site):
        made.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE, "utf-8")
    kind, kv_role, extra = {
        "nixl": ("NixlConnector", f"kv_{role}", {}),
        "mooncake": ("MooncakeConnector", f"kv_{role}", {"mooncake_protocol": "tcp", "num_workers": 2}),
        "example": ("ExampleConnector", "kv_both", {"shared_storage_path": str(store)}),
    }[options.connector]
    config = {
        "kv_connector": kind,
        "kv_role": kv_role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
    }
    directory = options.directory.absolute()
    environment = {
        "PYTHONPATH": f"{site}:{directory / options.connector}",
        "LD_LIBRARY_PATH": str(directory / "ibverbs"),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
        "UCX_TLS": "tcp,self,sm",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
    }
    flags = ["--kv-transfer-config", json.dumps(config)]
    return await start_engine(common.fleet, test, number, flags, environment)


async def _counts(stage: Stage) -> dict[str, float]:
    url = stage.engines[1].url
    bytes_moved = await stage.client.total(_BYTES, [engine.url for engine in stage.engines])
    return {"bytes": bytes_moved, "tokens": await stage.client.total(_HITS, [url])}


async def _until_checked(stage: Stage) -> None:
    """The replicas' own test chats (templates, tokens) are over: the decode engine counts them, too."""
    urls, ended = [engine.url for engine in stage.engines], -1.0
    async with asyncio.timeout(CHECKED_TIMEOUT_S):
        while (now := await stage.client.total(_ENDED, urls)) != ended:
            ended = now
            await asyncio.sleep(QUIET_S)


async def _lengths(stage: Stage, connector: str) -> list[Row]:
    """Prompts of many lengths, whole and streamed, at both replicas in turn."""
    rng, rows = random.Random(1), list[Row]()
    cases = [(length, stream) for length in LENGTHS[connector] for stream in (False, True)]
    for number, (length, stream) in enumerate(cases):
        prompt = [rng.randrange(5, 1900) for _ in range(length)]
        before = await _counts(stage)
        reply = await ask(stage.client, stage.replicas[number % 2].url, prompt, stream=stream)
        after = await _counts(stage)
        _check(reply, await ask(stage.client, stage.engines[0].url, prompt), f"{length} tokens")
        blocks, tokens = -(-length // BLOCK_SIZE), after["tokens"] - before["tokens"]
        # with parameters the prefill's own count, else what was read
        if not is_handed(reply) or reply.cached_tokens != (tokens if connector == "example" else 0):
            raise PairError(
                f"{length} tokens: not handed over, or usage is not that of the prefill: {reply}; the decode "
                f"engine counts {tokens:.0f} tokens of the prefill engine's"
            )
        # files hold whole blocks, without the last token, which is computed
        if tokens != (max(0, length - 2) // BLOCK_SIZE * BLOCK_SIZE if connector == "example" else length):
            raise PairError(f"{length} tokens: the decode engine counts {tokens:.0f} of the prefill engine's")
        seen = f"{after['bytes'] - before['bytes']:,.0f} bytes, {tokens:.0f} tokens"
        form = "streamed" if stream else "whole"
        rows.append((f"{length:,} tokens, {form}", f"{blocks} blocks", f"equal; {seen}"))
    await stage.until_equal()
    return rows


async def _at_once(stage: Stage) -> Row:
    many = prompts(2, AT_ONCE, 250)
    replies = await asyncio.gather(
        *[ask(stage.client, stage.replicas[0].url, one, stream=True) for one in many]
    )
    for prompt, reply in zip(many, replies, strict=True):
        _check(reply, await ask(stage.client, stage.engines[0].url, prompt), "at once")
    return f"{AT_ONCE} at once", f"{AT_ONCE} prompts", "equal"


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1900) for _ in range(tokens)] for _ in range(count)]


async def _wrong_engine(stage: Stage, proxy: Between) -> Row:
    """The parameters name another engine, as after a restart of the prefill engine at the same address."""
    url = stage.replicas[0].url
    for prompt, stream in zip(prompts(4, 2, 300), (False, True), strict=True):
        before = [await stage.client.total(each, [url]) for each in (_FAILURES, _FALLBACKS)]
        proxy.changes = {"remote_engine_id": "0" * 36}
        reply = await ask(stage.client, url, prompt, stream=stream)
        proxy.reset()
        _check(reply, await ask(stage.client, stage.engines[0].url, prompt), "wrong engine id")
        if [await stage.client.total(each, [url]) - 1 for each in (_FAILURES, _FALLBACKS)] != before:
            raise PairError("wrong engine id: not counted as a failure of the pair, and a fallback")
    await _works(stage, 5)
    return "wrong engine id", f"{proxy.spoilt} refused", "equal"


async def _works(stage: Stage, seed: int) -> None:
    """The pair hands over as before."""
    (prompt,) = prompts(seed, 1, 300)
    before = await _counts(stage)
    reply = await ask(stage.client, stage.replicas[0].url, prompt)
    _check(reply, await ask(stage.client, stage.engines[0].url, prompt), "afterwards")
    if (await _counts(stage))["tokens"] - before["tokens"] != len(prompt):
        raise PairError("nothing is handed over any more")


async def _lease_over(stage: Stage, proxy: Between) -> Row:
    """The prefill engine's answer comes when its blocks hold other prompts: to read them would be wrong."""
    client, engine, url = stage.client, stage.engines[0].url, stage.replicas[0].url
    expired = await client.total(_EXPIRED, [engine])

    async def until_overwritten() -> None:
        async with asyncio.timeout(LEASE_TIMEOUT_S):
            while True:
                await asyncio.sleep(0.5)
                if await client.total(_EXPIRED, [engine]) > expired:
                    break
        for other in prompts(7, 2 * NUM_BLOCKS * BLOCK_SIZE // 1500, 1500):
            await ask(client, engine, other)

    proxy.before = until_overwritten
    (prompt,) = prompts(6, 1, 300)
    before, fallbacks = await _counts(stage), await client.total(_FALLBACKS, [url])
    reply = await ask(client, url, prompt, stream=True)
    proxy.reset()
    after = await _counts(stage)
    _check(reply, await ask(client, engine, prompt), "lease over")
    if after["tokens"] != before["tokens"] or await client.total(_FALLBACKS, [url]) != fallbacks + 1:
        raise PairError("lease over: the decode engine has read blocks that the prefill engine had freed")
    await _works(stage, 8)
    return "lease over, blocks overwritten", "nothing", "equal"


async def _without_prefill(stage: Stage, proxy: Between) -> list[Row]:
    """The prefill engine is killed while it computes, and is gone after that."""
    client, url = stage.client, stage.replicas[0].url
    many = prompts(3, 4, 1500)
    alone = [await ask(client, stage.engines[0].url, prompt) for prompt in many]
    asking = [asyncio.create_task(ask(client, url, prompt, stream=True)) for prompt in many[:2]]
    await asyncio.sleep(0.1)
    await stage.fleet.processes[stage.engines[0].name].kill()
    await proxy.close()
    for reply, expected in zip(await asyncio.gather(*asking), alone[:2], strict=True):
        _check(reply, expected, "prefill engine killed meanwhile")
    for prompt, expected in zip(many[2:], alone[2:], strict=True):
        _check(await ask(client, url, prompt), expected, "prefill engine gone")
    return [("prefill engine killed meanwhile", "", "equal"), ("prefill engine gone", "", "equal")]


async def predictions(stage: Stage, allowed: set[str]) -> str:
    """Raises PairError if one was wrong."""
    found: dict[str, float] = {}
    for replica in stage.replicas:
        _, text = await stage.client.get(f"{replica.url}/metrics")
        for result, count in re.findall(
            r'kvrouter_predictions_total{[^}]*result="(\w+)"[^}]*} (\S+)', text.decode()
        ):
            found[result] = found.get(result, 0.0) + float(count)
    if found.keys() - allowed:
        raise PairError(f"predictions: {found}")
    return "predictions of prompts: " + ", ".join(f"{count:.0f} {result}" for result, count in found.items())


def _check(reply: Answer, alone: Answer, what: str) -> None:
    if reply.status != 200 or reply.text != alone.text:
        raise PairError(f"{what}: {reply.status}, {reply.text!r} instead of {alone.text!r}")
