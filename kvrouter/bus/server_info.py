"""The INFO line, with which every NATS server begins: what it is, before a client says who it is."""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.errors import KvRouterError

INFO_S = 2.0
_INFO_BYTES = 64 * 1024
_NAMES = Annotated[str, Meta(max_length=256)]


class ServerInfo(Struct, frozen=True):
    """The part of a server's INFO that is looked at."""

    server_id: _NAMES = ""
    server_name: _NAMES = ""
    version: _NAMES = ""
    cluster: _NAMES = ""
    max_payload: int = 0
    tls_required: bool = False
    auth_required: bool = False


_decode = msgspec.json.Decoder(ServerInfo).decode


async def read_info(url: str) -> ServerInfo:
    """The INFO line, with which every NATS server begins. Raises OSError, TimeoutError or KvRouterError."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    async with asyncio.timeout(INFO_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222, limit=_INFO_BYTES)
    try:
        async with asyncio.timeout(INFO_S):
            line = await reader.readline()
    except (TimeoutError, ValueError):  # ValueError: no end of the line within the limit
        raise KvRouterError("accepts connections, but sends no INFO line, as NATS does") from None
    finally:
        writer.transport.abort()  # nothing was written that has to arrive
    if not line.startswith(b"INFO "):
        raise KvRouterError(f"sends {line[:60].decode('utf-8', 'replace').strip()!r} instead of an INFO line")
    try:
        return _decode(line[5:])
    except UNREADABLE as error:
        raise KvRouterError(f"its INFO line cannot be read: {error}") from None
