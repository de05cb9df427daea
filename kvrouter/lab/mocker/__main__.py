"""`python -m kvrouter.lab.mocker`: a simulated vLLM engine. No GPU needed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

import structlog
import uvloop
import zmq

from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.server import running_mocker
from kvrouter.lab.mocker.settings import COMMAND, MockerSettings
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one mocker until SIGINT or SIGTERM; returns the exit status."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[MockerSettings]) -> int:
    config = loaded.settings.config()
    set_up_logs()
    try:
        uvloop.run(_serve(config))
    except (OSError, zmq.ZMQError) as error:  # a port or a file that cannot be used
        raise ConfigError(str(error)) from None
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
