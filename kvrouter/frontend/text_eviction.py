"""The timer that makes mode `prefix-affinity` forget old texts, in slices: a replica goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvrouter.core.fleet.replica import Replica

LOOK_S = 1.0
"""Seconds between two looks at most; a text index itself knows when its interval is over."""


@contextlib.asynccontextmanager
async def texts_evicted(replica: Replica) -> AsyncIterator[None]:
    """Evict while inside."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(_evict_forever(replica), name="texts")
        try:
            yield
        finally:
            running.cancel()


async def _evict_forever(replica: Replica) -> None:
    loop = asyncio.get_running_loop()
    while True:
        indexes = [router.selection.state.texts for router in replica.routers.values()]
        await asyncio.sleep(min([LOOK_S, *(texts.settings.eviction_interval_secs for texts in indexes)]))
        for texts in indexes:
            for _ in texts.eviction(loop.time()):
                await asyncio.sleep(0)
