"""A worker without a built-in adapter: turns TensorRT-LLM's KV events into kvrouter's.

    python docs/examples/trtllm_worker.py --url http://127.0.0.1:9000 --model tiny --block-size 4 --demo

With `--demo` the program replays a few events in the form of TensorRT-LLM's `get_kv_cache_events`, so it
runs on any machine; kvrouter's tests run it in this way. Without the flag it starts a model and follows its
events. That part needs a GPU, and kvrouter's authors have not run it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvrouter import KvPublisher, announce, connect

# TensorRT-LLM's cache levels: blocks on the GPU, and blocks offloaded to host memory.
TIER_OF_LEVEL = {0: "device", 1: "host"}

DEMO_EVENTS: list[dict[str, Any]] = [
    {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [100, 50]}},
    {
        "event_id": 1,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {"block_hash": 901, "tokens": [{"token_id": token} for token in (1, 2, 3, 4)]},
                {"block_hash": 902, "tokens": [{"token_id": token} for token in (5, 6, 7, 8)]},
            ],
        },
    },
    {
        "event_id": 2,
        "data": {
            "type": "stored",
            "parent_hash": 902,
            "blocks": [
                {"block_hash": 903, "tokens": [{"token_id": token} for token in (9, 10, 11, 12)]},
                {"block_hash": 904, "tokens": [{"token_id": 13}]},  # not full: no hash yet
            ],
        },
    },
    {
        "event_id": 3,
        "data": {"type": "updated", "block_hash": 903, "cache_level": {"old_value": 0, "new_value": 1}},
    },
    {"event_id": 4, "data": {"type": "removed", "block_hashes": [904]}},
]


def pass_on(event: dict[str, Any], blocks: KvPublisher) -> None:
    """Publish one of TensorRT-LLM's events. Removals of unknown blocks are ignored."""
    data = event["data"]
    match data["type"]:
        case "stored":
            full = [block for block in data["blocks"] if len(block["tokens"]) == blocks.block_size]
            tokens = [token["token_id"] for block in full for token in block["tokens"]]
            salt = full[0].get("cache_salt") if full else None
            if full:
                blocks.stored([block["block_hash"] for block in full], tokens, data["parent_hash"], salt=salt)
        case "removed":
            for tier in TIER_OF_LEVEL.values():  # the event does not name its level
                blocks.removed(data["block_hashes"], tier)
        case "updated" if data.get("cache_level"):
            levels = data["cache_level"]
            blocks.stored([data["block_hash"]], [], tier=TIER_OF_LEVEL[levels["new_value"]])
            blocks.removed([data["block_hash"]], TIER_OF_LEVEL[levels["old_value"]])


async def demo() -> AsyncIterator[dict[str, Any]]:
    """The events above, then silence."""
    for event in DEMO_EVENTS:
        yield event
    await asyncio.Event().wait()


async def follow_engine(model_path: str, tokens_per_block: int) -> AsyncIterator[dict[str, Any]]:
    """The events of an engine in this process, which must also serve HTTP at --url (`OpenAIServer`)."""
    from tensorrt_llm import LLM  # type: ignore[import-not-found]
    from tensorrt_llm.llmapi import KvCacheConfig  # type: ignore[import-not-found]

    cache = KvCacheConfig(
        enable_block_reuse=True, event_buffer_max_size=65536, tokens_per_block=tokens_per_block
    )
    llm = LLM(model_path, kv_cache_config=cache)
    while True:
        async for event in llm.get_kv_cache_events_async(timeout=2):
            yield event


async def run(flags: argparse.Namespace) -> None:
    """Announce the worker and publish its events until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    events = demo() if flags.demo else follow_engine(flags.model_path, flags.block_size)
    async with connect(flags.nats) as nats:
        blocks = KvPublisher(nats, flags.worker_id, flags.block_size)
        async with announce(
            nats,
            [blocks],
            url=flags.url,
            model=flags.model,
            namespace=flags.namespace,
            tiers={"device": flags.device_blocks, "host": flags.host_blocks},
            engine="tensorrt-llm",
        ) as worker:
            worker.load(running=0, waiting=0, kv_usage=0.0)
            task = asyncio.create_task(follow(events, lambda event: pass_on(event, blocks)))
            await stop.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def follow(events: AsyncIterator[dict[str, Any]], publish: Callable[[dict[str, Any]], None]) -> None:
    """Publish every event, in order."""
    async for event in events:
        publish(event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--worker-id", default="trt-0")
    parser.add_argument("--url", required=True, help="the engine's OpenAI-compatible server")
    parser.add_argument("--model", required=True, help="the model's name in requests")
    parser.add_argument("--model-path", default="")
    parser.add_argument("--block-size", type=int, default=32, help="TensorRT-LLM's tokens_per_block")
    parser.add_argument("--device-blocks", type=int, default=0)
    parser.add_argument("--host-blocks", type=int, default=0)
    parser.add_argument("--demo", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
