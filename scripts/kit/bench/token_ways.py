"""Token ids by this process against token ids by an engine's `/tokenize`, at several concurrencies.

The engine is one mocker, a process of its own: it tokenizes in threads, as vLLM does, and does nothing else.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from kvrouter.tokens.prefix_tokens import CacheSettings
from kvrouter.tokens.prompt import ChatPrompt, PromptEncoder
from kvrouter.tokens.remote_tokenizer import REQUEST_TIMEOUT_S, EngineTokenizer
from scripts.kit import deployment
from scripts.kit.fleet import Fleet, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.script import log_directory

CONCURRENCIES = (1, 8, 64)
PATIENCE_S = 60.0

Encode = Callable[[ChatPrompt], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class WayResult:
    """`late`: the share of prompts above REQUEST_TIMEOUT_S, whose requests would not wait for the ids."""

    way: str
    concurrent: int
    per_s: float
    p50_ms: float
    p99_ms: float
    late: float


def measure_ways(model_path: Path, texts: Sequence[str], prompts: int) -> list[WayResult]:
    """Chats with these texts, each with another beginning, so that no cache knows them."""
    return asyncio.run(_measure(model_path, texts, prompts))


async def _measure(model_path: Path, texts: Sequence[str], prompts: int) -> list[WayResult]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(stack.enter_context(log_directory("bench-ways"))))
        client = Client()
        stack.callback(client.close)
        port, events, replay = free_ports(3)
        url = f"http://127.0.0.1:{port}"
        wires = [f"--kv-events=tcp://127.0.0.1:{events}", f"--kv-replay=tcp://127.0.0.1:{replay}"]
        command = [
            *deployment.python("kvrouter.mocker"),
            f"--port={port}",
            f"--model-path={model_path}",
            *wires,
        ]
        mocker = await fleet.start("mocker", command)
        await wait_until_ok(client, mocker, f"{url}/health")
        engines = await stack.enter_async_context(EngineTokenizer.open())
        encoder = stack.enter_context(PromptEncoder.load(model_path, cache=CacheSettings()))
        ways: dict[str, Encode] = {
            "local": encoder.encode,
            "remote": lambda prompt: engines.tokenize(url, None, prompt, PATIENCE_S),
        }
        return [
            await _run(way, encode, concurrent, _chats(f"{way} {concurrent}", texts, prompts))
            for concurrent in CONCURRENCIES
            for way, encode in ways.items()
        ]


def _chats(name: str, texts: Sequence[str], prompts: int) -> list[ChatPrompt]:
    return [
        ChatPrompt([{"role": "user", "content": f"{name} {number}: {texts[number % len(texts)]}"}])
        for number in range(prompts)
    ]


async def _run(way: str, encode: Encode, concurrent: int, chats: list[ChatPrompt]) -> WayResult:
    taken: list[float] = []

    async def work() -> None:
        while chats:
            prompt, began = chats.pop(), time.perf_counter()
            await encode(prompt)
            taken.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrent):
            tasks.create_task(work())
    seconds = time.perf_counter() - began
    p99 = statistics.quantiles(taken, n=100)[98]
    late = sum(one > REQUEST_TIMEOUT_S for one in taken) / len(taken)
    return WayResult(way, concurrent, len(taken) / seconds, 1000 * statistics.median(taken), 1000 * p99, late)


def table_of(results: Sequence[WayResult], tokens: int) -> Table:
    table = Table(
        title=f"chats of {tokens:,} tokens that no cache knows: this process, or an engine's /tokenize"
    )
    table.add_column("way")
    for name in ("concurrent", "prompts/s", "p50, ms", "p99, ms", f"above {REQUEST_TIMEOUT_S:g} s"):
        table.add_column(name, justify="right")
    for one in results:
        figures = [f"{one.per_s:,.0f}", f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}", f"{one.late:.0%}"]
        table.add_row(one.way, str(one.concurrent), *figures)
    return table
