"""Reads HTTP answers within a bound, since an engine may send without end; and says why there is none.

The session's timeout bounds the time. Answers are not decompressed: a few KB of gzip may hold a gigabyte.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from functools import partial
from typing import cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from kvrouter.core.wire.addresses import Network
from kvrouter.resolving import CheckedResolver

# Of one answer. /metrics of vLLM with 64 data-parallel ranks has about 5 MB, 500,000 token ids have 3 MB.
MOST_BYTES = 8 * 1024 * 1024
MOST_INTERIM_ANSWERS = 16
NOT_IMPLEMENTED = 501
# Headers of a session, which is opened with `auto_decompress=False`: both are needed, since an engine may
# compress without being asked.
UNPACKED = {"accept-encoding": "identity"}


class _Handler(ResponseHandler):
    """aiohttp's handler, with a bound for interim answers (1xx).

    aiohttp (3.14) reads them in a loop as fast as they arrive, and meanwhile lets no other task run.
    """

    def data_received(self, data: bytes) -> None:
        """Break off if more heads wait than one answer has."""
        super().data_received(data)
        if len(self) > MOST_INTERIM_ANSWERS and self.transport is not None:
            self.set_exception(aiohttp.ClientPayloadError("sends interim answers (1xx) without end"))
            self.transport.abort()


def engine_connector(
    tls: ssl.SSLContext | bool,
    *,
    limit: int = 100,
    force_close: bool = False,
    networks: Sequence[Network] | None = None,
) -> aiohttp.TCPConnector:
    """A connector for sessions with engines, with at most `limit` connections at once.

    `networks`: those that names may lead to, () for all but what is never allowed (core/wire/addresses.py);
    None: any, as an operator's own engine may have any address. `tls` False: certificates are not verified.
    """
    resolver = CheckedResolver(networks) if networks is not None else None
    connector = aiohttp.TCPConnector(ssl=tls, limit=limit, force_close=force_close, resolver=resolver)
    handler = partial(_Handler, loop=asyncio.get_running_loop())
    connector._factory = cast("partial[ResponseHandler]", handler)  # aiohttp 3.14 has no public way
    return connector


def address_below(url: str, path: str = "") -> URL:
    """The address of a path of the engine at `url`, which may have a path of its own. Raises ValueError.

    As it is written, as the relay sends it: aiohttp would write %7e as ~, and another engine might answer.
    """
    return URL(f"{url.rstrip('/')}/{path}", encoded=True)


def is_alive(status: int) -> bool:
    """Whether an engine with this status of its health path serves.

    One with a key answers 401, one without this path 404 or 501, as gateways do.
    """
    return status < 500 or status == NOT_IMPLEMENTED


async def read_answer(response: aiohttp.ClientResponse, most_bytes: int = MOST_BYTES) -> bytes:
    """The whole body. Raises ClientPayloadError if it is longer, and ClientError or TimeoutError."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise aiohttp.ClientPayloadError(f"answers more than {most_bytes} bytes")
    return bytes(body)


def no_answer(error: BaseException) -> str:
    """Why there is no answer. The caller names the address.

    aiohttp's text of a connection that fails repeats the address, and has `ssl:default` for plain HTTP, too.
    It is kept for errors of TLS, whose cause is in it.
    """
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error.os_error, ssl.SSLError):
        number = error.os_error.errno or 0
        # getaddrinfo's errors have negative numbers, and texts of their own
        return os.strerror(number).lower() if number > 0 else error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__
