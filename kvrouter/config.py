"""Settings that all processes share, and what they open with them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import structlog

from kvrouter.bus.connection import Bus
from kvrouter.bus.embedded import embedded_server
from kvrouter.bus.options import NatsOptions
from kvrouter.core.feeds.lease import MAX_INTERVAL_MS
from kvrouter.core.native import versions
from kvrouter.core.wire.ids import IDENTIFIER_RULE, WORKER_ID_RULE, is_identifier, is_worker_id
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Settings, setting

log = structlog.get_logger()

MIN_HEARTBEAT_S = 0.05
MAX_HEARTBEAT_S = MAX_INTERVAL_MS / 1000

# The longest waiting time that a flag accepts.
DAY_S = 86_400.0


def read_identifier(text: str) -> str:
    """A namespace, which is a part of NATS subjects. Raises ValueError."""
    if not is_identifier(text):
        raise ValueError(IDENTIFIER_RULE)
    return text


def read_worker_id(text: str) -> str:
    """NAME or GROUP.NAME. Raises ValueError."""
    if not is_worker_id(text):
        raise ValueError(WORKER_ID_RULE)
    return text


@dataclass(frozen=True, slots=True)
class NamespaceOptions(Settings):
    """What every process that uses the bus needs."""

    heading = "NATS"

    nats: NatsOptions = field(default_factory=NatsOptions)
    namespace: str = setting(
        "default",
        "separates fleets that share a NATS server",
        metavar="NAME",
        read=read_identifier,
        is_top=True,
    )


@dataclass(frozen=True, slots=True)
class CommonOptions(NamespaceOptions):
    """What every long-running process has."""

    heading = "Logs and core"

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "lowest level that is logged to stderr", is_top=True, reloadable=True
    )
    log_format: Literal["console", "json"] = setting("console", "json: one object per line")
    heartbeat_s: float = setting(
        1.0,
        "seconds between heartbeats, which other processes are informed of",
        least=MIN_HEARTBEAT_S,
        most=MAX_HEARTBEAT_S,
    )
    core: str | None = setting(
        None,
        "version of the hot tables and hashes: python, or native (C)",
        choices=versions.CORES,
        default_text="native if it is built",
    )


def read_key(flag: str, path: Path | None) -> str | None:
    """The bearer key in a flag's file; None without a file or if it is empty. Raises ConfigError."""
    if path is None:
        return None
    try:
        return path.read_text().strip() or None
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: the file is not UTF-8 text") from None


def use_core(core: str | None) -> None:
    """Choose the version of the hot tables and hashes (--core). Raises ConfigError if it is not built."""
    if versions.choose(core) == versions.PYTHON and core is None:
        effect = "the Python version is used: same results, more time and memory in a large fleet"
        log.info("core.not_built", reason=versions.why_not_built, effect=effect)


@contextlib.asynccontextmanager
async def open_bus(options: NatsOptions | str, *, name: str, user: str) -> AsyncIterator[Bus]:
    """The bus at these servers, or at the value of a --nats flag; starts the embedded server if requested.

    `user`: see Bus.open.
    """
    if isinstance(options, str):
        options = NatsOptions(tuple(options.split(",")))
    async with contextlib.AsyncExitStack() as stack:
        if options.is_embedded:
            url = await stack.enter_async_context(embedded_server(options))
            options = replace(options, servers=(url,))
        yield await stack.enter_async_context(Bus.open(options, name=name, user=user))
