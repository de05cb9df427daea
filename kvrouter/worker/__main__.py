"""`python -m kvrouter.worker`: the agent beside an engine."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog
import uvloop

from kvrouter.errors import KvRouterError
from kvrouter.telemetry.logs import set_up_logs
from kvrouter.worker.agent import leaves, serve
from kvrouter.worker.engines_file import read_engines
from kvrouter.worker.options import add_flags, read_options
from kvrouter.worker.several import serve_all

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvrouter.worker", description=__doc__)
    add_flags(parser)
    arguments = parser.parse_args(argv)
    set_up_logs(arguments.log_level, arguments.log_format)
    status = 0
    try:
        uvloop.run(_run(_service(arguments)))
    except* KvRouterError as group:
        for error in leaves(group):
            log.error("worker.failed", error=str(error), kind=type(error).__name__)
        status = 1
    return status


def _service(arguments: argparse.Namespace) -> Callable[[asyncio.Event], Awaitable[None]]:
    """What runs until an event is set: the agent of one engine, or of several."""
    if arguments.engines is not None:
        return partial(serve_all, read_engines(arguments))
    return partial(serve, read_options(arguments))


async def _run(service: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await service(stop)


if __name__ == "__main__":
    sys.exit(main())
