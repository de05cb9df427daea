"""Agents for several engines in one process: one bus, one socket per shared endpoint.

An agent that ends with any error does not disturb the others and is started again after a pause. An agent
that was taken over (another agent uses its worker id) is started again once that other agent is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

import structlog

from kvrouter.bus import Bus, Subjects
from kvrouter.bus.rights import AGENT
from kvrouter.config import open_bus
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import KvRouterError, leaves
from kvrouter.long_wait import LongWait
from kvrouter.worker.agent import serve_engine
from kvrouter.worker.announcer import TakenOverError
from kvrouter.worker.drain import Duty
from kvrouter.worker.engines_file import EngineList
from kvrouter.worker.metrics_port import MetricsOf
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.shared_socket import SharedSocket
from kvrouter.worker.zmq.sockets import EngineEvents

log = structlog.get_logger()

RETRY_S = 10.0
# Heartbeats of the other agent that may be lost before it counts as gone: two agents with one id would
# otherwise take the worker over from each other without end.
_SILENT_BEATS = 5
_USED_TWICE = "another agent, which started later, announces this worker id"
_ONE_EACH = "give each engine its own worker id, or end one of the agents: this one then goes on"


async def serve_all(
    engines: EngineList,
    duties: Sequence[Duty],
    metrics: MetricsOf | None = None,
    *,
    retry_s: float = RETRY_S,
) -> None:
    """Run the agents until their duties are done. Raises ConfigError."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(open_bus(engines.agents[0].nats, name="workers", user=AGENT))
        sockets = {
            endpoint: await stack.enter_async_context(
                SharedSocket.open(endpoint, topics, engines.topic_filter)
            )
            for endpoint, topics in engines.shared.items()
        }
        metrics = metrics or MetricsOf()
        log.info("workers.up", engines=len(engines.agents), shared=sorted(sockets))
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(socket.run()) for socket in sockets.values()]
            agents = [
                group.create_task(_keep(options, bus, sockets, duty, metrics, retry_s=retry_s))
                for options, duty in zip(engines.agents, duties, strict=True)
            ]
            await asyncio.wait(agents)
            for reader in readers:
                reader.cancel()


async def _keep(
    options: AgentOptions,
    bus: Bus,
    sockets: Mapping[str, SharedSocket],
    duty: Duty,
    metrics: MetricsOf,
    *,
    retry_s: float,
) -> None:
    """Run one engine's agent, and start it again after each error."""
    while not duty.leave.is_set():
        try:
            await serve_engine(options, bus, partial(_open_events, options, sockets), duty, metrics)
            return
        except Exception as error:  # any: one engine must not stop the agents of the others
            errors = leaves(error)
        duty.dismiss()
        for each in errors:
            _log_failure(options, each)
        if any(isinstance(each, TakenOverError) for each in errors):
            await _until_silent(options, bus, duty, retry_s)
        else:
            await _pause(duty, retry_s)


def _log_failure(options: AgentOptions, error: BaseException) -> None:
    # an error of kvrouter states the remedy; any other error is a bug, and its traceback is needed
    trace = None if isinstance(error, KvRouterError) else error
    log.error(
        "worker.failed",
        worker=options.worker_id,
        error=str(error),
        kind=type(error).__name__,
        exc_info=trace,
    )


async def _pause(duty: Duty, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await duty.leave.wait()


async def _until_silent(options: AgentOptions, bus: Bus, duty: Duty, retry_s: float) -> None:
    """Wait until the other agent has sent nothing for `retry_s` and for _SILENT_BEATS heartbeats."""
    received = asyncio.Event()
    subject = Subjects(options.namespace).live_worker(WorkerId(options.worker_id))
    async with bus.part() as part:
        await part.subscribe(subject, lambda *_: received.set())
        received.set()
        clock = asyncio.get_running_loop().time
        wait = LongWait("worker_id.awaited", "the other agent's end", clock(), worker=options.worker_id)
        while not duty.leave.is_set() and (received.is_set() or not bus.connected):
            wait.look(clock(), _USED_TWICE if bus.connected else bus.outage_reason, _ONE_EACH)
            received.clear()
            await _pause(duty, max(retry_s, _SILENT_BEATS * options.heartbeat_s))


@contextlib.asynccontextmanager
async def _open_events(
    options: AgentOptions, sockets: Mapping[str, SharedSocket]
) -> AsyncIterator[list[EngineEvents]]:
    """Each rank's events, on a shared socket if its endpoint has one."""
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for each in options.endpoints:
            if each.events in sockets:
                opened.append(stack.enter_context(sockets[each.events].events(each)))
            else:
                opened.append(await stack.enter_async_context(EngineEvents.open(each)))
        yield opened
