"""Real engines on this machine's CPU, serving a tiny model with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import zmq
import zmq.asyncio

from kvrouter.worker.engines.adapter import Adapter
from kvrouter.worker.engines.sglang import SglangAdapter
from kvrouter.worker.engines.vllm import BlockRemoved, VllmAdapter
from scripts.kit.engine_tests.adapters import RANK
from scripts.kit.fleet import Fleet, FleetError, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports

Kind: TypeAlias = Literal["vllm", "sglang"]
# vLLM's attention on a CPU supports only multiples of 32; for SGLang it is the page size.
BLOCK_SIZE = 32
MAX_MODEL_LEN = 2_048
START_TIMEOUT_S = 600.0

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
ENVIRONMENT = {
    **_OFFLINE,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # for `previous_response_id`
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_ENVIRONMENT_OF_SGLANG = {**_OFFLINE, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_SET_CPU_AFFINITY": "0"}


@dataclass(frozen=True, slots=True)
class EngineTest:
    """Settings of all engines of the test."""

    kind: Kind
    program: Path
    """`vllm`, or the Python that has SGLang."""
    model_path: Path
    adapters: dict[str, Path]
    num_blocks: int
    name: str = "tiny"
    load_format: str = "dummy"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine; its process changes with a restart."""

    name: str
    url: str
    events: str
    replay: str

    def named(self, url: str = "", **more: str) -> str:
        """The value of `--engine` of `kvrouter serve`; `url`: of a proxy before it."""
        keys = {"kv": self.events, "replay": self.replay, **more}
        return ",".join([url or self.url, *(f"{key}={value}" for key, value in keys.items())])


def find_program(kind: Kind, directory: Path) -> Path:
    """The engine's program in `directory`. Raises FleetError with the way to make one."""
    program = directory / ("venv/bin/vllm" if kind == "vllm" else "sglang/bin/python")
    if not program.is_file():
        raise FleetError(
            f"{program} is missing: `scripts/test-{kind} --build DIR` makes it (docs/engines.md)"
        )
    return program.absolute()


async def start_engine(
    fleet: Fleet,
    test: EngineTest,
    number: int,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Engine:
    """Start one engine, with more flags; it answers after about 20 s."""
    port, events, _, replay, _ = free_ports(5)  # a second rank has the next ports
    engine = Engine(
        f"{test.kind}-{number}",
        f"http://127.0.0.1:{port}",
        f"tcp://127.0.0.1:{events}",
        f"tcp://127.0.0.1:{replay}",
    )
    kv_events = {
        "publisher": "zmq",
        # The engine binds an endpoint only if it contains "*" or "::"; libzmq reads this one as 127.0.0.1
        "endpoint": f"tcp://[::ffff:127.0.0.1]:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "topic": f"kv@127.0.0.1:{port}@{test.name}",
    }
    command = _vllm if test.kind == "vllm" else _sglang
    whole = [*command(test, port, kv_events), *flags]
    await fleet.start(engine.name, whole, env=_environment(test) | dict(environment))
    return engine


async def wait_until_up(client: Client, fleet: Fleet, engines: Iterable[Engine]) -> None:
    for engine in engines:
        await wait_until_ok(client, fleet.processes[engine.name], f"{engine.url}/health", START_TIMEOUT_S)


def _environment(test: EngineTest) -> dict[str, str]:
    if test.kind == "sglang":
        return _ENVIRONMENT_OF_SGLANG
    return {**ENVIRONMENT, "VIRTUAL_ENV": str(test.program.parent.parent)}


def _sglang(test: EngineTest, port: int, kv_events: Mapping[str, object]) -> list[str]:
    return [
        str(test.program), "-m", "sglang.launch_server", "--model-path", str(test.model_path),
        "--served-model-name", test.name, "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--load-format", "dummy", "--dtype", "float32",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule",
        "--page-size", str(BLOCK_SIZE), "--max-total-tokens", str(BLOCK_SIZE * test.num_blocks),
        "--context-length", str(MAX_MODEL_LEN), "--max-running-requests", "8",
        "--enable-metrics", "--enable-cache-report", "--skip-server-warmup", "--tool-call-parser", "qwen25",
        "--kv-events-config", json.dumps(kv_events),
    ]  # fmt: skip


def _vllm(test: EngineTest, port: int, kv_events: Mapping[str, object]) -> list[str]:
    return [
        str(test.program), "serve", str(test.model_path), "--served-model-name", test.name,
        "--host", "127.0.0.1", "--port", str(port), "--load-format", test.load_format,
        "--dtype", "float32", "--enforce-eager", "--enable-prefix-caching", "--block-size", str(BLOCK_SIZE),
        "--num-gpu-blocks-override", str(test.num_blocks), "--max-model-len", str(MAX_MODEL_LEN),
        # share of the memory: a CPU engine takes 0.92 by default, and there are two engines
        "--gpu-memory-utilization", "0.2",
        "--max-num-seqs", "16", "--max-num-batched-tokens", "4096",
        "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps({"enable_kv_cache_events": True, **kv_events}),
        # without a parser, requests with tools are rejected
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        *(_lora(test.adapters) if test.adapters else ()),
    ]  # fmt: skip


def _lora(adapters: Mapping[str, Path]) -> list[str]:
    modules = [f"{name}={path}" for name, path in adapters.items()]
    flags = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", str(len(adapters))]
    return [*flags, "--lora-modules", *modules]


@dataclass(slots=True)
class Evictions:
    """Number of blocks removed by all watched engines."""

    blocks: int = 0


@contextlib.asynccontextmanager
async def counting_evictions(kind: Kind, endpoints: Sequence[str]) -> AsyncIterator[Evictions]:
    """Count the engines' evictions while inside; a run without any would prove little."""
    evictions = Evictions()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        for endpoint in endpoints:
            socket.connect(endpoint)
        adapter = VllmAdapter() if kind == "vllm" else SglangAdapter()
        task = asyncio.create_task(_count(socket, adapter, evictions))
        try:
            yield evictions
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _count(socket: zmq.asyncio.Socket, adapter: Adapter[Any], evictions: Evictions) -> None:
    while True:
        *_, payload = await socket.recv_multipart()
        removed = [event for event in adapter.decode(payload).events if isinstance(event, BlockRemoved)]
        evictions.blocks += sum(len(event.block_hashes) for event in removed)
