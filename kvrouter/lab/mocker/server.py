"""A whole mocker: engines, event sockets and HTTP, opened in order and closed in reverse order."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web

from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.app import MockService
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import Engine
from kvrouter.lab.mocker.rank import Rank
from kvrouter.lab.mocker.text import Text

# After a stop, clients get this long to read the end of their answers.
SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Mocker:
    """A running mocker and its addresses."""

    url: str  # `http://host:port`, with the real port
    service: MockService
    ranks: tuple[Rank, ...]

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engine of each data-parallel rank."""
        return tuple(rank.engine for rank in self.ranks)

    @property
    def engine(self) -> Engine:
        """The engine of rank 0."""
        return self.ranks[0].engine

    @property
    def kv_events(self) -> str:
        """The endpoint of rank 0's events, for a SUB."""
        return self.ranks[0].publisher.endpoint

    @property
    def kv_replay(self) -> str | None:
        """The endpoint of rank 0's replays, for a DEALER."""
        return self.ranks[0].publisher.replay_endpoint


@asynccontextmanager
async def running_mocker(config: MockerConfig | None = None) -> AsyncIterator[Mocker]:
    """Run a mocker on this event loop until the block ends.

    At the end its port closes, and running requests end with finish_reason "abort".
    """
    config = config or MockerConfig()
    async with AsyncExitStack() as stack:
        text = stack.enter_context(Text.load(config.model_path))
        engine = replace(config.engine, vocabulary=text.vocabulary) if config.model_path else config.engine
        ranks = [
            await stack.enter_async_context(Rank.open(config, engine, number))
            for number in range(config.data_parallel_size)
        ]
        service = MockService(config, text, ranks)
        url = await stack.enter_async_context(_listening(config, service))
        yield Mocker(url, service, tuple(ranks))


@asynccontextmanager
async def _listening(config: MockerConfig, service: MockService) -> AsyncIterator[str]:
    """Serve HTTP; aiohttp sets TCP_NODELAY on the sockets it accepts."""
    # handler_cancellation: without it aiohttp lets a handler run on, and a client that left would keep its
    # blocks
    runner = web.AppRunner(
        service.app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        try:
            await site.start()
        except OSError as error:
            is_unknown = isinstance(error, socket.gaierror)
            reason = error.strerror if is_unknown else os.strerror(error.errno or 0)
            flag = "--host" if is_unknown or error.errno == errno.EADDRNOTAVAIL else "--port"
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason} ({flag})") from None
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        for rank in service.ranks:
            rank.shut_down()
        await runner.cleanup()
