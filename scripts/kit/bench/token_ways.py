"""Token ids by this process against token ids by an engine's `/tokenize`, at several concurrencies.

Measured for three APIs, from the bytes of a body to the ids: with parsing and conversion, as in a frontend.

The engine is one mocker, a process of its own: it tokenizes in threads, as vLLM does, and does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table

from kvrouter.bodies import messages, openai, responses
from kvrouter.bodies.openai import CompletionRequest
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
Json: TypeAlias = dict[str, Any]


def _chat_body(text: str) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


APIS: dict[str, tuple[Callable[[bytes], CompletionRequest], Callable[[str], Json]]] = {
    "chat": (openai.parse_chat, _chat_body),
    "messages": (messages.parse, lambda text: _chat_body(text) | {"max_tokens": 1}),
    "responses": (responses.parse, lambda text: {"model": "m", "input": text}),
}


@dataclass(frozen=True, slots=True)
class WayResult:
    """`late`: the share of prompts above REQUEST_TIMEOUT_S, whose requests would not wait for the ids."""

    way: str
    api: str
    concurrent: int
    per_s: float
    p50_ms: float
    p99_ms: float
    late: float


def measure_ways(model_path: Path, texts: Sequence[str], prompts: int) -> list[WayResult]:
    """Requests with these texts, each with another beginning, so that no cache knows them."""
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
            *deployment.python("kvrouter.lab.mocker"),
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
            await _run(way, encode, api, concurrent, _bodies(api, f"{way} {concurrent}", texts, prompts))
            for concurrent in CONCURRENCIES
            for way, encode in ways.items()
            for api in APIS
        ]


def _bodies(api: str, name: str, texts: Sequence[str], prompts: int) -> list[bytes]:
    body = APIS[api][1]
    return [
        json.dumps(body(f"{api} {name} {number}: {texts[number % len(texts)]}")).encode()
        for number in range(prompts)
    ]


async def _run(way: str, encode: Encode, api: str, concurrent: int, bodies: list[bytes]) -> WayResult:
    taken: list[float] = []
    parse = APIS[api][0]

    async def work() -> None:
        while bodies:
            body, began = bodies.pop(), time.perf_counter()
            prompt = parse(body).prompt
            assert isinstance(prompt, ChatPrompt)
            await encode(prompt)
            taken.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrent):
            tasks.create_task(work())
    seconds = time.perf_counter() - began
    p99 = statistics.quantiles(taken, n=100)[98]
    late = sum(one > REQUEST_TIMEOUT_S for one in taken) / len(taken)
    p50 = statistics.median(taken)
    return WayResult(way, api, concurrent, len(taken) / seconds, 1000 * p50, 1000 * p99, late)


def table_of(results: Sequence[WayResult], tokens: int) -> Table:
    table = Table(
        title=f"chats of {tokens:,} tokens that no cache knows: this process, or an engine's /tokenize"
    )
    table.add_column("way")
    table.add_column("API")
    for name in ("concurrent", "prompts/s", "p50, ms", "p99, ms", f"above {REQUEST_TIMEOUT_S:g} s"):
        table.add_column(name, justify="right")
    for one in results:
        figures = [f"{one.per_s:,.0f}", f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}", f"{one.late:.0%}"]
        table.add_row(one.way, one.api, str(one.concurrent), *figures)
    return table
