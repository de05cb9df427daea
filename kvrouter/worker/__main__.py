"""`python -m kvrouter.worker`: the agent beside an engine.

SIGTERM or SIGINT: no new requests, leave when those that run have ended; a second one: leave now.
SIGUSR1: no new requests, until the next SIGUSR1.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

import structlog
import uvloop

from kvrouter.errors import KvRouterError
from kvrouter.telemetry.logs import set_up_logs
from kvrouter.worker.agent import serve
from kvrouter.worker.drain import Duty
from kvrouter.worker.options import AgentOptions, add_flags, read_options

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvrouter.worker", description=__doc__)
    add_flags(parser)
    arguments = parser.parse_args(argv)
    set_up_logs(arguments.log_level, arguments.log_format)
    status = 0
    try:
        uvloop.run(_run(read_options(arguments)))
    except* KvRouterError as group:
        for error in _leaves(group):
            log.error("worker.failed", error=str(error), kind=type(error).__name__)
        status = 1
    return status


async def _run(options: AgentOptions) -> None:
    leave = asyncio.Event()
    duty = Duty(leave)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, duty.retire)
    loop.add_signal_handler(signal.SIGUSR1, duty.pause)
    await serve(options, leave, duty)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors themselves, without the groups that task groups put around them."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves


if __name__ == "__main__":
    sys.exit(main())
