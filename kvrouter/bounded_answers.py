"""Answers of engines over HTTP, read within a bound: an engine may send without end.

The time is bounded by the session's timeout. Nothing is unpacked: a few KB of gzip may be a gigabyte.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from typing import cast

import aiohttp
from aiohttp.client_proto import ResponseHandler

MOST_BYTES = 8 * 1024 * 1024
"""Of one answer. /metrics of vLLM with 64 data-parallel ranks is about 5 MB, 500,000 token ids are 3 MB."""
MOST_INTERIM_ANSWERS = 16
UNPACKED = {"accept-encoding": "identity"}
"""Headers of a session, which is opened with `auto_decompress=False`."""


class _Handler(ResponseHandler):
    """aiohttp's, which would take interim answers (1xx) as fast as they come, and let no other task run."""

    def data_received(self, data: bytes) -> None:
        """Give up on an engine of which more heads wait than one answer has."""
        super().data_received(data)
        if len(self) > MOST_INTERIM_ANSWERS and self.transport is not None:
            self.set_exception(aiohttp.ClientPayloadError("sends interim answers (1xx) without end"))
            self.transport.abort()


def engine_connector(
    tls: ssl.SSLContext, *, limit: int = 100, force_close: bool = False
) -> aiohttp.TCPConnector:
    """For a session with engines; at most `limit` connections at once."""
    connector = aiohttp.TCPConnector(ssl=tls, limit=limit, force_close=force_close)
    handler = partial(_Handler, loop=asyncio.get_running_loop())
    connector._factory = cast("partial[ResponseHandler]", handler)  # no public name says it
    return connector


async def read_answer(response: aiohttp.ClientResponse, most_bytes: int = MOST_BYTES) -> bytes:
    """The whole body. Raises ClientPayloadError if it is longer, and ClientError or TimeoutError."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise aiohttp.ClientPayloadError(f"answers more than {most_bytes} bytes")
    return bytes(body)
