"""`python -m kvrouter.worker`: the agent of an engine.

SIGTERM or SIGINT: take no new requests and leave when the running ones have ended; the second signal: leave
now. SIGUSR1: take no new requests until the next SIGUSR1.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Sequence

import structlog
import uvloop

from kvrouter.config import FlagHelp, use_core
from kvrouter.errors import ConfigError, KvRouterError, leaves
from kvrouter.telemetry.logs import set_up_logs
from kvrouter.worker.agent import serve
from kvrouter.worker.drain import Duty
from kvrouter.worker.engines_file import read_engines
from kvrouter.worker.options import add_flags, read_options
from kvrouter.worker.shared_process import serve_all

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvrouter.worker", description=__doc__, formatter_class=FlagHelp
    )
    add_flags(parser)
    arguments = parser.parse_args(argv)
    set_up_logs(arguments.log_level, arguments.log_format)
    status = 0
    try:
        use_core(arguments.core)
        uvloop.run(_run(arguments))
    except* KvRouterError as group:  # a TaskGroup raises groups, a failed start a plain error
        for error in leaves(group):
            log.error("worker.failed", error=str(error), kind=type(error).__name__)
            status = max(status, 2 if isinstance(error, ConfigError) else 1)
    return status


def _service(arguments: argparse.Namespace) -> tuple[Sequence[Duty], Awaitable[None]]:
    """The agent of one engine, or those of several, with the Duty of each, which the signals change."""
    if arguments.engines is not None:
        engines = read_engines(arguments)
        duties = [Duty(asyncio.Event()) for _ in engines.agents]
        return duties, serve_all(engines, duties)
    options, leave = read_options(arguments), asyncio.Event()
    duty = Duty(leave)
    return [duty], serve(options, leave, duty)


async def _run(arguments: argparse.Namespace) -> None:
    duties, service = _service(arguments)

    def retire() -> None:
        for duty in duties:
            duty.retire()

    def pause() -> None:
        for duty in duties:
            duty.pause()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, retire)
    loop.add_signal_handler(signal.SIGUSR1, pause)
    await service


if __name__ == "__main__":
    sys.exit(main())
