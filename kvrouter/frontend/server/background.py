"""The tasks that one replica runs besides serving requests. One that fails stops the service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping

import structlog

from kvrouter.core.audit.findings import Audit
from kvrouter.core.fleet.replica import Replica
from kvrouter.frontend.requests.exchanges import InFlight
from kvrouter.replica.publishing import Publishing

log = structlog.get_logger()

AUDIT_S = 1.0
PROGRESS_S = 1.0
# The progress of this many answers is booked before other tasks get a turn: it takes less than 1 ms.
PROGRESS_SLICE = 500
# At most, between two evictions of texts: a text index itself knows when its interval has passed.
EVICTION_S = 1.0


@contextlib.asynccontextmanager
async def running(coroutines: Mapping[str, Coroutine[object, object, None]]) -> AsyncIterator[None]:
    """Run the coroutines, by the name of their task, while inside."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
        try:
            yield
        finally:
            for task in started:
                task.cancel()


async def audit_forever(audit: Audit) -> None:
    """Log each problem of a worker once when it begins, and once when it is over."""
    while True:
        # In steps: with a thousand workers, one look in one piece would block the event loop.
        steps = audit.step_count()
        parts = audit.steps(steps)
        for _ in range(steps):
            await asyncio.sleep(AUDIT_S / steps)
            audit.check_events(asyncio.get_running_loop().time())
            next(parts, None)
        begun, over = audit.changes()
        for finding in begun:
            log.warning(
                "worker.problem", worker=finding.worker, pool=finding.pool, problem=finding.problem.text
            )
        for finding in over:
            log.info(
                "worker.problem_over", worker=finding.worker, pool=finding.pool, was=finding.problem.text
            )


async def report_progress(in_flight: InFlight, publishing: Publishing) -> None:
    """Book the output blocks of running answers, again and again (`--router-track-output-blocks`)."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        await book_progress(in_flight, publishing)


async def book_progress(in_flight: InFlight, publishing: Publishing) -> None:
    """Book the output blocks that running answers have filled."""
    running = list(in_flight.running.items())
    for start in range(0, len(running), PROGRESS_SLICE):
        for attempt, one in running[start : start + PROGRESS_SLICE]:
            # `progress` ignores a booking that was freed since `running` was copied
            one.work.router.bookings.progress(one.placement.key, attempt.events)
        publishing.flush_soon()
        await asyncio.sleep(0)


async def evict_texts(replica: Replica) -> None:
    """Evict old texts of mode prefix-affinity, in slices: requests are served in between."""
    loop = asyncio.get_running_loop()
    while True:
        indexes = [router.tables.texts for router in replica.routers.values()]
        await asyncio.sleep(min([EVICTION_S, *(texts.settings.eviction_interval_secs for texts in indexes)]))
        for texts in indexes:
            for _ in texts.eviction(loop.time()):
                await asyncio.sleep(0)
