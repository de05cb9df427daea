"""Moves requests away from engines that hang, as long as their clients have not seen a byte.

Once a second, for each worker that requests wait for:

    its agent says `down` ────────────────────────> streamed requests move
    the agent says `down`, is silent past its lease
    or has left, and a GET of the engine's /health,
    sent from here, gets no answer ───────────────> all requests move

An agent that dies beside a healthy engine moves nothing. The answer to a request that is not streamed
begins when it is whole, so what an agent says is not enough for it. A request moves as long as `--retries`
allows, and only if another worker could take it now. In a second one of ten requests in flight moves, and at
least one: an engine that hangs must not become a burst of prefills on the others.

A pool's last worker stays although its agent is silent, as long as its engine answers: it is probed as well,
and goes after three probes without an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import aiohttp
import structlog
from msgspec import Struct

from kvrouter.bounded_answers import engine_connector
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Placement
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.frontend.accept import Work
from kvrouter.relay.exchange import Attempt
from kvrouter.tls import trusting

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
MOVED_SHARE = 10
"""One of so many requests in flight moves in a second."""
PROBE_TIMEOUT_S = 5.0
"""As long as connecting to a worker may take."""
MOST_PROBES = 32
"""At once; other engines wait for their turn."""
MISSES_UNTIL_GONE = 3
"""As an agent that calls its engine down."""
MOST_MISSES = 50
"""So many requests a second are asked in vain whether another worker could take them; others wait for their
turn. Where a thousand targets are full, each costs 0.7 ms."""


class Running(Struct):
    """A request at a worker."""

    work: Work
    placement: Placement
    excluded: frozenset[Target] | None
    """Where it may not go if it moves; None: it stays, as no retry is left."""


Probe: TypeAlias = Callable[[str], Awaitable[bool]]
"""Whether the engine at a URL answers."""


class HungEngines:
    """Looks after the attempts in `running`, which others fill and empty."""

    def __init__(
        self,
        running: Mapping[Attempt, Running],
        silent_workers: Callable[[], Sequence[tuple[Pool, Worker]]],
        probe: Probe,
        now: Callable[[], float],
    ) -> None:
        """`silent_workers`: kept although their leases have ended. `now`: the clock of decisions."""
        self._running = running
        self._silent_workers = silent_workers
        self._probe = probe
        self._now = now
        self._probes: dict[str, asyncio.Future[bool]] = {}
        """By URL, of engines in doubt only: the probe under way, or the last one. The oldest come first."""
        self._misses: dict[str, int] = {}
        """How many probes in a row an engine has not answered, by URL; not those that answered the last."""
        self._missed: set[Attempt] = set()
        """Those for which no other worker was found, until all others have been looked at."""

    async def run(self) -> None:
        """Look once a second, for ever."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                await self.look()
        finally:
            self._keep_probing(set())

    async def look(self) -> int:
        """Probe the engines in doubt, and move what waits for those that hang; returns how many moved."""
        doubts = {attempt: doubt for attempt, one in self._running.items() if (doubt := _doubt(attempt, one))}
        silent = self._silent_workers()
        urls = {self._running[attempt].placement.url for attempt in doubts}
        self._keep_probing(urls.union(worker.card.url for _, worker in silent))
        self._let_go(silent)
        moved, most = 0, max(1, len(self._running) // MOVED_SHARE)
        misses = 0
        for attempt, reason in self._in_turn(dict(self._hanging(doubts))):
            one = self._running.get(attempt)
            if moved == most or misses == MOST_MISSES:
                break
            if one is None or attempt.is_committed:
                continue  # meanwhile
            if self._has_alternative(one):
                attempt.move(reason)
                moved += 1
            else:
                self._missed.add(attempt)
                misses += 1
            await asyncio.sleep(0)
        return moved

    def _let_go(self, silent: Sequence[tuple[Pool, Worker]]) -> None:
        """A worker without an agent is kept as its pool's last one only while its engine answers."""
        for pool, worker in silent:
            if self._misses.get(worker.card.url, 0) >= MISSES_UNTIL_GONE:
                pool.unreachable(WorkerId(worker.card.worker_id))

    def _in_turn(self, hanging: Mapping[Attempt, str]) -> list[tuple[Attempt, str]]:
        """The oldest first, but those that were missed after all others."""
        self._missed &= hanging.keys()
        if len(self._missed) == len(hanging):
            self._missed.clear()
        return sorted(hanging.items(), key=lambda one: one[0] in self._missed)

    def _hanging(self, doubts: Mapping[Attempt, str]) -> Iterator[tuple[Attempt, str]]:
        """The attempts that should move, the oldest first, and why."""
        for attempt, doubt in doubts.items():
            one = self._running[attempt]
            if one.placement.url in self._misses:
                yield attempt, f"its agent is {doubt}, and the engine does not answer /health"
            elif doubt == "down" and one.work.stream:
                yield attempt, "its agent says that the engine is down"

    def _keep_probing(self, urls: set[str]) -> None:
        """Probe these engines again and again, and no others."""
        for url in self._probes.keys() - urls:
            self._probes.pop(url).cancel()
            self._misses.pop(url, None)
        over = [url for url, probe in self._probes.items() if probe.done()]
        for url in over:
            probe = self._probes[url]
            if probe.exception() is None and probe.result():
                self._misses.pop(url, None)
            else:
                self._misses[url] = self._misses.get(url, 0) + 1
        free = MOST_PROBES - len(self._probes) + len(over)
        for url in [*sorted(urls - self._probes.keys()), *over][:free]:  # oldest first
            self._probes.pop(url, None)
            self._probes[url] = asyncio.ensure_future(self._probe(url))

    def _has_alternative(self, one: Running) -> bool:
        """Whether another worker could take it now."""
        router, excluded = one.work.router, one.excluded or frozenset()
        own = router.pool.targets_of(one.placement.target.worker_id)
        return router.has_eligible(one.work.route, self._now(), exclude=excluded.union(own))


def _doubt(attempt: Attempt, one: Running) -> str:
    """What speaks against the engine; empty: nothing, or the attempt does not wait, or it may not move."""
    if attempt.is_committed or one.excluded is None or one.work.route.wanted is not None:
        return ""
    worker = one.work.router.pool.workers.get(one.placement.target.worker_id)
    if worker is None or worker.silent or worker.card.url != one.placement.url:
        return "gone"
    return "down" if worker.state == "down" else ""


@contextlib.asynccontextmanager
async def probing(tls: ssl.SSLContext | None) -> AsyncIterator[Probe]:
    """Asks engines over HTTP. `tls`: whom to trust behind https:// URLs; None: the system's authorities."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    connector = engine_connector(tls or trusting(None), limit=MOST_PROBES, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        yield partial(_answers, http)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether it says anything but that it is broken: behind a key, or without this route, it is well."""
    try:
        async with http.get(f"{url}/health", allow_redirects=False) as response:
            return response.status < 500
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
