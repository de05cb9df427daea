"""One scrape for all processes of `--processes N`: the process that is asked asks the others.

each process ──its admin URL──> its line of an unnamed file that the parent opened
GET /metrics of one ──> its own samples, and those of every URL in the file ──> one text, labelled `process`
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlencode

import aiohttp
import structlog

from kvrouter.bounded_answers import UNPACKED, no_answer, read_answer
from kvrouter.telemetry.merged import merged

log = structlog.get_logger()

# Prometheus gives up after 10 s. A process that hangs must not take the others' samples along.
TIMEOUT_S = 4.0
# Of one process: a fleet of 1,000 workers has 3 MB.
MOST_BYTES = 32 * 1024 * 1024
# Answers that are read at the same time.
MOST_AT_ONCE = 8
# Of the file: room for the longest host name.
LINE_BYTES = 512


class Siblings:
    """The processes on one port, this one included."""

    def __init__(self, fd: int, number: int, url: str) -> None:
        """Tell the others this process's admin URL. `fd`: of the file, which has no name."""
        self._fd = fd
        self._own = str(number)
        os.pwrite(fd, url.encode().ljust(LINE_BYTES), (number - 1) * LINE_BYTES)

    def urls(self) -> dict[str, str]:
        """The admin URL of each process that has started, by number."""
        size = os.fstat(self._fd).st_size
        lines = [os.pread(self._fd, LINE_BYTES, start) for start in range(0, size, LINE_BYTES)]
        # lines that were not written yet are zero bytes
        urls = {str(number): line.decode().strip("\0 ") for number, line in enumerate(lines, 1)}
        return {number: url for number, url in urls.items() if url}

    async def metrics(self, own: Callable[[], Awaitable[bytes]], names: Sequence[str]) -> bytes:
        """The samples of all processes. A process that does not answer has `kvrouter_process_scraped` 0."""
        limit = asyncio.Semaphore(MOST_AT_ONCE)
        urls = self.urls()
        query = f"?{urlencode([('name[]', name) for name in names])}" if names else ""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        # Not verified: the address is this host's and from the parent, and the certificate names the service.
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, headers=UNPACKED
        ) as session:

            async def of(number: str) -> bytes | None:
                if number == self._own:
                    return await own()
                async with limit:
                    return await _asked(session, f"{urls[number]}/metrics{query}")

            texts = await asyncio.gather(*map(of, urls))
        return await merged(dict(zip(urls, texts, strict=True)))


async def _asked(session: aiohttp.ClientSession, url: str) -> bytes | None:
    """The answer; None if there is none in time."""
    try:
        async with session.get(url) as response:
            return await read_answer(response, MOST_BYTES) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        log.warning("metrics.process_missing", url=url, error=no_answer(error))
        return None
