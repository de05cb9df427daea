"""Agents for several engines in one process: one bus, one socket per shared endpoint.

An agent that ends with an error is started again after a while and does not disturb the others; one that
was taken over (another agent has its worker id) stays away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import structlog

from kvrouter.bus import Bus
from kvrouter.config import open_bus
from kvrouter.errors import KvRouterError, leaves
from kvrouter.worker.agent import serve_engine
from kvrouter.worker.announcer import TakenOverError
from kvrouter.worker.drain import Duty
from kvrouter.worker.engines_file import EngineList
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.shared_socket import SharedSocket
from kvrouter.worker.zmq_feed import ZmqFeed

log = structlog.get_logger()

RETRY_S = 10.0


async def serve_all(engines: EngineList, duties: Sequence[Duty], *, retry_s: float = RETRY_S) -> None:
    """Run the agents until their duties are done, or the last of them was taken over. Raises ConfigError."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(open_bus(engines.agents[0].nats, name="workers"))
        sockets = {
            endpoint: await stack.enter_async_context(
                SharedSocket.open(endpoint, topics, engines.topic_filter)
            )
            for endpoint, topics in engines.shared.items()
        }
        log.info("workers.up", engines=len(engines.agents), shared=sorted(sockets))
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(socket.run()) for socket in sockets.values()]
            agents = [
                group.create_task(_keep(options, bus, sockets, duty, retry_s))
                for options, duty in zip(engines.agents, duties, strict=True)
            ]
            await asyncio.wait(agents)
            for reader in readers:
                reader.cancel()
    if not any(duty.retired.is_set() or duty.leave.is_set() for duty in duties):
        raise KvRouterError("no agent is left: each worker id is used by an agent that started later")


async def _keep(
    options: AgentOptions,
    bus: Bus,
    sockets: Mapping[str, SharedSocket],
    duty: Duty,
    retry_s: float,
) -> None:
    """One engine's agent, again and again."""
    while not duty.leave.is_set():
        try:
            async with _feeds(options, sockets) as feeds:
                await serve_engine(options, bus, feeds, duty)
        except* KvRouterError as group:
            errors = leaves(group)
        else:
            return
        duty.dismiss()
        for error in errors:
            log.error("worker.failed", worker=options.worker_id, error=str(error), kind=type(error).__name__)
        if any(isinstance(error, TakenOverError) for error in errors):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(retry_s):
                await duty.leave.wait()


@contextlib.asynccontextmanager
async def _feeds(options: AgentOptions, sockets: Mapping[str, SharedSocket]) -> AsyncIterator[list[ZmqFeed]]:
    """Each rank's feed, on a shared socket where there is one."""
    async with contextlib.AsyncExitStack() as stack:
        feeds = []
        for feed in options.feeds:
            if feed.events in sockets:
                feeds.append(stack.enter_context(sockets[feed.events].feed(feed)))
            else:
                feeds.append(await stack.enter_async_context(ZmqFeed.open(feed)))
        yield feeds
