"""Flags that every process shares, and the checks that make start-up fail with a clear message."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import AsyncIterator

from kvrouter.bus.connection import Bus, NatsOptions
from kvrouter.bus.embedded import DEFAULT_URL, embedded_server
from kvrouter.core.ids import is_identifier


def identifier(text: str) -> str:
    """An argparse type: a namespace or a worker id."""
    if not is_identifier(text):
        raise argparse.ArgumentTypeError(f"{text!r}: use 1 to 64 of A-Z a-z 0-9 _ -")
    return text


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0")
    return value


def not_negative(text: str) -> float:
    """An argparse type: a number of at least 0."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be at least 0")
    return value


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r}: must be finite")
    return value


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """--nats, --namespace, --heartbeat-s, --log-level, --log-format."""
    parser.add_argument(
        "--nats",
        default=os.environ.get("NATS_URL", DEFAULT_URL),
        metavar="URL[,URL…]|embedded",
        help=f"NATS servers; 'embedded' starts one at {DEFAULT_URL} unless one answers there",
    )
    parser.add_argument(
        "--namespace", type=identifier, default="default", help="keeps fleets on one NATS apart"
    )
    parser.add_argument("--heartbeat-s", type=positive, default=1.0, help="seconds between heartbeats")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    parser.add_argument("--log-format", choices=["console", "json"], default="console")


@contextlib.asynccontextmanager
async def open_bus(nats: str, *, name: str) -> AsyncIterator[Bus]:
    """The bus that a --nats value names, with the embedded server behind it if it says so."""
    async with contextlib.AsyncExitStack() as stack:
        if nats == "embedded":
            nats = await stack.enter_async_context(embedded_server())
        servers = tuple(url.strip() for url in nats.split(",") if url.strip())
        yield await stack.enter_async_context(Bus.open(NatsOptions(servers), name=name))
