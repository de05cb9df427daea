"""`python -m kvrouter.worker`: the agent of an engine.

SIGTERM or SIGINT: take no new requests and leave when the running ones have ended; the second signal: leave
now. SIGUSR1: take no new requests until the next SIGUSR1. SIGHUP: read the log level again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Sequence

import structlog
import uvloop

from kvrouter.config import use_core
from kvrouter.errors import ConfigError, KvRouterError, leaves
from kvrouter.processes.descriptors import raise_limit
from kvrouter.processes.reloading import reload_forever
from kvrouter.processes.signals import Reloads, outlive
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs
from kvrouter.worker.agent import serve
from kvrouter.worker.drain import Duty
from kvrouter.worker.engines_file import EngineList, read_engines
from kvrouter.worker.metrics_port import MetricsOf, agents_metrics
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.settings import COMMAND, WorkerSettings
from kvrouter.worker.shared_process import serve_all

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; returns the exit status."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[WorkerSettings]) -> int:
    settings = loaded.settings
    file = settings.engine.engines
    agents = settings.agent() if file is None else read_engines(loaded, file)
    set_up_logs(settings.log_level, settings.log_format)
    for warning in agents.warnings if isinstance(agents, EngineList) else ():
        log.warning("settings.ignored", reason=warning)
    status = 0
    try:
        use_core(settings.core)
        raise_limit()
        uvloop.run(_run(agents, loaded))
    except* KvRouterError as group:  # a TaskGroup raises groups, a failed start a plain error
        for error in leaves(group):
            log.error("worker.failed", error=str(error), kind=type(error).__name__)
            status = max(status, 2 if isinstance(error, ConfigError) else 1)
    return status


def _service(agents: AgentOptions | EngineList, metrics: MetricsOf) -> tuple[Sequence[Duty], Awaitable[None]]:
    """The agent of one engine, or those of several, with the Duty of each, which the signals change."""
    if isinstance(agents, EngineList):
        duties = [Duty(asyncio.Event()) for _ in agents.agents]
        return duties, serve_all(agents, duties, metrics)
    leave = asyncio.Event()
    duty = Duty(leave)
    return [duty], serve(agents, leave, duty, metrics)


async def _run(agents: AgentOptions | EngineList, loaded: Loaded[WorkerSettings]) -> None:
    async with agents_metrics(loaded.settings.metrics) as metrics:
        await _serve(agents, loaded, metrics)


async def _serve(
    agents: AgentOptions | EngineList, loaded: Loaded[WorkerSettings], metrics: MetricsOf
) -> None:
    duties, service = _service(agents, metrics)

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
    outlive(signal.SIGUSR2, signal.SIGALRM)
    async with asyncio.TaskGroup() as tasks:
        reloading = tasks.create_task(reload_forever(Reloads(retire), loaded))
        await service
        reloading.cancel()


if __name__ == "__main__":
    sys.exit(main())
