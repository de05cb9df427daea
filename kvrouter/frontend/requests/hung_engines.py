"""Moves requests away from engines that hang, while their clients have not received a byte.

Once a second, for each worker that requests wait for:

    its agent reports `down` ─────────────────────> streamed requests move
    the agent reports `down`, is silent past its
    lease or has left, and the engine does not
    answer GETs of /health and /v1/models from
    here ─────────────────────────────────────────> all requests move

    the engine that computed its prompt is down,
    gone or another process, and the decode
    engine would wait for its blocks; or the peer
    from which it would read blocks ──────────────> the request moves

If only the agent dies, no request moves. The answer to a request that is not streamed begins when it is
complete, so a late first byte proves nothing, and the agent's report alone does not move it. A request moves
as long as `--retries` allows, and only if another worker could accept it now. In a second one of ten requests
in flight moves, and at least one: an engine that hangs must not become a burst of prefills on the others.

A pool's last worker is kept when its agent falls silent, while its engine answers. It is probed as well, and
removed after three probes without an answer.
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

from kvrouter.bounded_answers import address_below, engine_connector, is_alive
from kvrouter.connectors import SERVED
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.addresses import Network
from kvrouter.core.wire.ids import WorkerId
from kvrouter.frontend.records.record import AttemptRecord
from kvrouter.relay.exchange import Attempt
from kvrouter.tls import trusting

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
# One of this many requests in flight moves in a second.
MOVED_SHARE = 10
# As long as connecting to a worker may take (upstream.CONNECT_TIMEOUT_S).
PROBE_TIMEOUT_S = 5.0
# Probes at one time. Other engines wait for their turn.
MOST_PROBES = 32
# An agent, too, reports its engine `down` after three failures.
MISSES_UNTIL_GONE = 3
# In a second at most this many searches for another worker may find none; the other requests wait for their
# turn. With a thousand full targets a search costs 0.7 ms.
MOST_MISSES = 50


# Whether the engine at a URL answers.
Probe: TypeAlias = Callable[[str], Awaitable[bool]]


class HungEngines:
    """Watches the attempts in `running`, which Completions fills and empties."""

    def __init__(
        self,
        running: Mapping[Attempt, AttemptRecord],
        silent_workers: Callable[[], Sequence[tuple[Pool, Worker]]],
        probe: Probe,
        now: Callable[[], float],
    ) -> None:
        """`silent_workers` are kept although their leases have ended. `now` is the clock of decisions."""
        self._running = running
        self._silent_workers = silent_workers
        self._probe = probe
        self._now = now
        # By URL, only of suspected engines: the running probe, or the last one. The oldest come first.
        self._probes: dict[str, asyncio.Future[bool]] = {}
        # By URL: how many probes in a row got no answer. An answer removes the entry.
        self._misses: dict[str, int] = {}
        # Attempts for which no other worker was found. They wait until all others have been tried.
        self._missed: set[Attempt] = set()

    async def run(self) -> None:
        """Look once a second until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                await self.look()
        finally:
            self._keep_probing(set())

    async def look(self) -> int:
        """Probe suspected engines and move the requests that wait for hung ones; returns how many moved."""
        for attempt, record in list(self._running.items()):
            if not attempt.is_committed and (lost := self._lost(record)):
                attempt.move(lost)
        suspicions = {
            attempt: suspicion
            for attempt, one in self._running.items()
            if (suspicion := _suspicion(attempt, one))
        }
        silent = self._silent_workers()
        urls = {self._running[attempt].placement.url for attempt in suspicions}
        self._keep_probing(urls.union(worker.card.url for _, worker in silent))
        self._remove_unreachable(silent)
        moved, most = 0, max(1, len(self._running) // MOVED_SHARE)
        misses = 0
        for attempt, reason in self._in_turn(dict(self._hanging(suspicions))):
            one = self._running.get(attempt)
            if moved == most or misses == MOST_MISSES:
                break
            if one is None or attempt.is_committed:
                continue  # it ended or was answered during a sleep below
            if self._has_alternative(one):
                attempt.move(reason)
                moved += 1
            else:
                self._missed.add(attempt)
                misses += 1
            await asyncio.sleep(0)  # a search for another worker may take 0.7 ms (MOST_MISSES)
        return moved

    def _remove_unreachable(self, silent: Sequence[tuple[Pool, Worker]]) -> None:
        """Remove the workers kept without an agent whose engines do not answer either.

        Otherwise the forged card of a worker that never existed would be kept as its pool's last one.
        """
        for pool, worker in silent:
            if self._misses.get(worker.card.url, 0) >= MISSES_UNTIL_GONE:
                pool.unreachable(WorkerId(worker.card.worker_id))

    def _in_turn(self, hanging: Mapping[Attempt, str]) -> list[tuple[Attempt, str]]:
        """The oldest first, but attempts in `_missed` last."""
        self._missed &= hanging.keys()
        if len(self._missed) == len(hanging):
            self._missed.clear()
        return sorted(hanging.items(), key=lambda one: one[0] in self._missed)

    def _hanging(self, suspicions: Mapping[Attempt, str]) -> Iterator[tuple[Attempt, str]]:
        """The attempts that should move, the oldest first, each with the reason."""
        for attempt, suspicion in suspicions.items():
            one = self._running[attempt]
            if one.placement.url in self._misses:
                yield attempt, f"its agent is {suspicion}, and the engine does not answer probes"
            elif suspicion == "down" and one.work.stream:
                yield attempt, "its agent reports that the engine is down"

    def _keep_probing(self, urls: set[str]) -> None:
        """Keep a probe running for each of these engines, and end all other probes."""
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
        # A dict keeps the order of insertion, so removing and adding a URL puts it last.
        free = MOST_PROBES - len(self._probes) + len(over)
        for url in [*sorted(urls - self._probes.keys()), *over][:free]:  # oldest first
            self._probes.pop(url, None)
            self._probes[url] = asyncio.ensure_future(self._probe(url))

    def _lost(self, one: AttemptRecord) -> str:
        """Why blocks that its engine waits for will not come. Those of a peer it can also compute."""
        lost = _lost_peer(one)
        return lost if lost and self._has_alternative(one) else _lost_source(one)

    def _has_alternative(self, one: AttemptRecord) -> bool:
        """Whether another worker could accept the request now."""
        router, excluded = one.work.router, one.excluded or frozenset()
        present = router.pool.targets_of(one.placement.target.worker_id)
        return router.has_eligible(one.work.route, self._now(), exclude=excluded.union(present))


def _suspicion(attempt: Attempt, one: AttemptRecord) -> str:
    """Why the engine is suspected; empty if it is not, or if the attempt does not wait or must not move."""
    if attempt.is_committed or one.excluded is None or one.work.route.wanted is not None:
        return ""
    worker = one.work.router.pool.workers.get(one.placement.target.worker_id)
    if worker is None or worker.silent or worker.card.url != one.placement.url:
        return "gone"
    return "down" if worker.state == "down" else ""


def _lost_source(one: AttemptRecord) -> str:
    """Why the blocks that its decode engine waits for will not come; empty if they may."""
    first = one.prefill
    if first is None or first.source is None or not one.is_handed_over:
        return ""
    if not SERVED[first.placement.connector].waits_for_the_lost:
        return ""
    worker = one.work.router.pool.workers.get(first.placement.target.worker_id)
    if worker is None or worker.state == "down" or first.source.engine_id not in worker.card.kv_engine_ids:
        return f"the engine that computed its prompt, of {first.placement.target.worker_id}, is gone"
    return ""


def _lost_peer(one: AttemptRecord) -> str:
    """Why its engine would wait in vain for blocks of a peer, up to 30 s; empty if it would not."""
    pull = one.placement.pull
    if pull is None or one.excluded is None:  # no retry is left
        return ""
    worker = one.work.router.pool.workers.get(pull.source.worker_id)
    if worker is None or worker.state == "down":
        return f"the engine whose blocks it would read, of {pull.source.worker_id}, is gone"
    return ""


@contextlib.asynccontextmanager
async def probing(tls: ssl.SSLContext | None, networks: Sequence[Network] = ()) -> AsyncIterator[Probe]:
    """Probes engines over HTTP. `tls` verifies https:// URLs; None: with the system's authorities."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    # A new connection for each probe: it also shows whether the engine still accepts connections.
    connector = engine_connector(
        tls or trusting(None), limit=MOST_PROBES, force_close=True, networks=networks
    )
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        yield partial(_answers, http)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether both answers are those of an engine that serves (`is_alive`).

    /health alone does not show it: a data-parallel rank that scales or is retired answers 200 there only.
    """
    try:
        for path in ("health", "v1/models"):
            async with http.get(address_below(url, path), allow_redirects=False) as response:
                if not is_alive(response.status):
                    return False
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
    return True
