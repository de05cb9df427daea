"""`python -m scripts.kit.bench.wire.announce`: announces fake workers to frontends.

An agent would fetch each engine's health and load every second. This process publishes the same heartbeats
without requests, so only the frontend is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import uvloop

from kvrouter import KvPublisher, announce, connect

BLOCK_SIZE = 16
DEVICE_BLOCKS = 65_536


def main() -> int:
    """Announce until SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--nats", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--connector", default="", help="every other one computes prompts only")
    parser.add_argument("--engine-version", default="", help="of vLLM; without one, no engine is named")
    uvloop.run(_announce(parser.parse_args()))
    return 0


async def _announce(flags: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(connect(flags.nats))
        for number, url in enumerate(flags.url):
            role = ("prefill", "decode")[number % 2] if flags.connector else "both"
            blocks = KvPublisher(nats, f"w{urlsplit(url).port}", block_size=BLOCK_SIZE)
            worker = announce(
                nats, [blocks], url=url, model=flags.model, namespace=flags.namespace,
                tiers={"device": DEVICE_BLOCKS}, role=role, kv_connector=flags.connector,
                engine="vllm" if flags.engine_version else "", engine_version=flags.engine_version,
            )  # fmt: skip
            await stack.enter_async_context(worker)
        await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())
