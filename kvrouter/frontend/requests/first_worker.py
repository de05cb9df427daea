"""Lets requests wait for a first worker (`--wait-for-workers-s`), where the fleet starts with the traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_EVERY_S = 0.05


class FirstWorker:
    """`is_known` returns whether any worker has been seen."""

    def __init__(self, is_known: Callable[[], bool], wait_s: float) -> None:
        self._is_known = is_known
        self._wait_s = wait_s
        self._look: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Return when a worker is known, or when the request has waited long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        while (left_s := until - loop.time()) > 0 and not self._is_known():
            if self._look is None or self._look.done():
                self._look = asyncio.create_task(self._until_known(), name="first worker")
            await asyncio.wait([self._look], timeout=left_s)

    async def _until_known(self) -> None:
        """One look for all requests that wait. It ends by itself, so nobody has to cancel it."""
        until = asyncio.get_running_loop().time() + self._wait_s
        loop = asyncio.get_running_loop()
        while not self._is_known() and loop.time() < until:  # noqa: ASYNC110  # nothing marks the first card
            await asyncio.sleep(LOOK_EVERY_S)
