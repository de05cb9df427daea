"""`python -m kvrouter.mocker`: a simulated vLLM engine. No GPU needed."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
import uvloop
import zmq

from kvrouter.errors import ConfigError
from kvrouter.mocker.config import MockerConfig
from kvrouter.mocker.engine import EngineConfig
from kvrouter.mocker.events import EVENT_SHAPES
from kvrouter.mocker.eviction import ORDERS
from kvrouter.mocker.server import running_mocker
from kvrouter.telemetry.logs import set_up_logs

log = structlog.get_logger(__name__)

# 65,536 tokens at block size 16: small enough that blocks are evicted in a demo.
DEFAULT_NUM_BLOCKS = 4096

LARGEST_DEFAULT_MODEL_LEN = 32_768


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one mocker until SIGINT or SIGTERM."""
    try:
        config = config_from(_parser().parse_args(arguments))
        set_up_logs()
        uvloop.run(_serve(config))
    except (ConfigError, OSError, zmq.ZMQError) as error:  # a wrong flag, file or port
        sys.exit(f"mocker: {error}")


async def _serve(config: MockerConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running_mocker(config) as mocker:
        log.info(
            "mocker.ready",
            url=mocker.url,
            kv_events=[rank.publisher.endpoint for rank in mocker.ranks],
            kv_replay=[rank.publisher.replay_endpoint for rank in mocker.ranks],
            model=config.model_name,
            blocks=config.engine.num_blocks,
            block_size=config.engine.block_size,
        )
        await stop.wait()


def config_from(flags: argparse.Namespace) -> MockerConfig:
    """The settings in the flags. Raises ConfigError."""
    capacity_tokens = flags.num_blocks * flags.block_size
    engine = EngineConfig(
        num_blocks=flags.num_blocks,
        block_size=flags.block_size,
        host_blocks=flags.host_blocks,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_model_len=flags.max_model_len or min(LARGEST_DEFAULT_MODEL_LEN, capacity_tokens),
        eviction=flags.eviction,
    )
    return MockerConfig(
        engine=engine,
        host=flags.host,
        port=flags.port,
        kv_events=flags.kv_events,
        kv_replay=None if flags.kv_replay == "none" else flags.kv_replay,
        replay_buffer=flags.replay_buffer,
        topic=flags.topic,
        event_shape=flags.event_shape,
        model_name=flags.served_model_name,
        model_path=flags.model_path,
        loras=tuple(flags.lora),
        speedup=flags.speedup,
        data_parallel_size=flags.data_parallel_size,
        max_num_queued_reqs=flags.max_num_queued_reqs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvrouter.mocker", description=__doc__)
    _add_server_flags(parser)
    _add_engine_flags(parser)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    default = MockerConfig()
    add("--host", default=default.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=default.port, help="0: a free port, which is logged (%(default)s)")
    add(
        "--kv-events",
        default=default.kv_events,
        metavar="ENDPOINT",
        help="ZMQ endpoint of the KV events, always bound; rank N binds port + N (%(default)s)",
    )
    add(
        "--kv-replay",
        default=default.kv_replay,
        metavar="ENDPOINT",
        help="ZMQ endpoint of replays, bound; 'none': no replays (%(default)s)",
    )
    add("--replay-buffer", type=int, metavar="N", help="batches kept for replay (10000, as vLLM)")
    add("--topic", default=default.topic, help="ZMQ topic of the events (empty)")
    add(
        "--event-shape",
        choices=EVENT_SHAPES,
        default=default.event_shape,
        help="shape of the events: map as in vLLM 0.32, array as in vLLM up to 0.23 (%(default)s)",
    )
    add("--served-model-name", default=default.model_name, help="the model's name (%(default)s)")
    add(
        "--model-path",
        type=Path,
        help="directory with tokenizer and chat template; without it: token ids only",
    )
    add("--lora", action="append", default=[], metavar="NAME", help="also serve a LoRA adapter (repeatable)")
    add("--max-num-queued-reqs", type=int, metavar="N", help="answer 503 beyond N unfinished requests")
    add(
        "--data-parallel-size",
        type=int,
        default=default.data_parallel_size,
        metavar="N",
        help="ranks, each with a separate cache (%(default)s)",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    default = EngineConfig()
    add("--block-size", type=int, default=default.block_size, help="tokens in a block (%(default)s)")
    add("--num-blocks", type=int, default=DEFAULT_NUM_BLOCKS, help="device blocks (%(default)s)")
    add("--host-blocks", type=int, default=0, help="blocks of a host tier for evicted blocks (%(default)s)")
    add("--eviction", choices=tuple(ORDERS), default=default.eviction, help="order of eviction (%(default)s)")
    add("--max-num-seqs", type=int, default=default.max_num_seqs, help="requests in a step (%(default)s)")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        help="tokens in a step (%(default)s)",
    )
    add("--max-model-len", type=int, help="tokens (32768, or the capacity of the blocks)")
    add("--speedup", type=float, default=1.0, help="speed relative to an H100 with an 8B model (%(default)s)")


if __name__ == "__main__":
    main()
