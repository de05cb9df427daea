"""Real vLLM engines on this machine's CPU, serving a tiny model with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from kvrouter.worker.engines.vllm import BlockRemoved, decode_batch
from scripts.kit.fleet import Fleet, FleetError, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.vllm.adapters import RANK

# vLLM's attention on a CPU supports only multiples of 32.
BLOCK_SIZE = 32
MAX_MODEL_LEN = 2_048
START_TIMEOUT_S = 240.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # for `previous_response_id`
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class EngineTest:
    """Settings of all engines of the test."""

    vllm: Path
    model_path: Path
    adapters: dict[str, Path]
    num_blocks: int
    name: str = "tiny"


@dataclass(frozen=True, slots=True)
class Vllm:
    """A running engine; its process changes with a restart."""

    name: str
    url: str
    events: str
    replay: str


def find_vllm(directory: Path) -> Path:
    """The `vllm` command in the venv of `directory`. Raises FleetError with the way to make one."""
    command = directory / "venv" / "bin" / "vllm"
    if not command.is_file():
        raise FleetError(
            f"{command} is missing: DIR must hold a venv with vLLM "
            "(`scripts/test-vllm --build DIR` makes one, see docs/engines.md)"
        )
    return command.absolute()


async def start_engine(fleet: Fleet, test: EngineTest, number: int) -> Vllm:
    """Start one engine; it answers after about 20 s."""
    port, events, replay = free_ports(3)
    engine = Vllm(
        f"vllm-{number}",
        f"http://127.0.0.1:{port}",
        f"tcp://127.0.0.1:{events}",
        f"tcp://127.0.0.1:{replay}",
    )
    await fleet.start(engine.name, _command(test, port, events, replay), env=_environment(test))
    return engine


async def wait_until_up(client: Client, process: Process, engine: Vllm) -> None:
    """Wait until the engine serves requests."""
    await wait_until_ok(client, process, f"{engine.url}/health", START_TIMEOUT_S)


def _environment(test: EngineTest) -> dict[str, str]:
    return {**ENVIRONMENT, "VIRTUAL_ENV": str(test.vllm.parent.parent)}


def _command(test: EngineTest, port: int, events: int, replay: int) -> list[str]:
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # vLLM binds an endpoint only if it contains "*" or "::"; libzmq reads this one as 127.0.0.1
        "endpoint": f"tcp://[::ffff:127.0.0.1]:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "topic": f"kv@127.0.0.1:{port}@{test.name}",
    }
    return [
        str(test.vllm), "serve", str(test.model_path), "--served-model-name", test.name,
        "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--dtype", "float32",
        "--enforce-eager", "--enable-prefix-caching", "--block-size", str(BLOCK_SIZE),
        "--num-gpu-blocks-override", str(test.num_blocks), "--max-model-len", str(MAX_MODEL_LEN),
        # share of the memory: a CPU engine takes 0.92 by default, and there are two engines
        "--gpu-memory-utilization", "0.2",
        "--max-num-seqs", "16", "--max-num-batched-tokens", "4096",
        "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(kv_events),
        # without a parser, requests with tools are rejected
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", str(len(test.adapters)),
        "--lora-modules", *(f"{name}={path}" for name, path in test.adapters.items()),
    ]  # fmt: skip


@dataclass(slots=True)
class Evictions:
    """Number of blocks removed by all watched engines."""

    blocks: int = 0


@contextlib.asynccontextmanager
async def counting_evictions(endpoints: Sequence[str]) -> AsyncIterator[Evictions]:
    """Count the engines' evictions while inside; a run without any would prove little."""
    evictions = Evictions()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        for endpoint in endpoints:
            socket.connect(endpoint)
        task = asyncio.create_task(_count(socket, evictions))
        try:
            yield evictions
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _count(socket: zmq.asyncio.Socket, evictions: Evictions) -> None:
    while True:
        *_, payload = await socket.recv_multipart()
        removed = [event for event in decode_batch(payload).events if isinstance(event, BlockRemoved)]
        evictions.blocks += sum(len(event.block_hashes) for event in removed)
