"""Answers of engines over HTTP, read within a bound: an engine may send without end.

The time is bounded by the session's timeout. Nothing is unpacked: a few KB of gzip may be a gigabyte.
"""

from __future__ import annotations

import aiohttp

MOST_BYTES = 8 * 1024 * 1024
"""Of one answer. /metrics of vLLM with 64 data-parallel ranks is about 5 MB, 500,000 token ids are 3 MB."""
UNPACKED = {"accept-encoding": "identity"}
"""Headers of a session, which is opened with `auto_decompress=False`."""


async def read_answer(response: aiohttp.ClientResponse, most_bytes: int = MOST_BYTES) -> bytes:
    """The whole body. Raises ClientPayloadError if it is longer, and ClientError or TimeoutError."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            raise aiohttp.ClientPayloadError(f"answers more than {most_bytes} bytes")
    return bytes(body)
