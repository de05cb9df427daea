"""Where requests wait while every worker they may use is full: the shell around core/routing/admission.py.

    admitted() ──room──> the caller routes, at once
        │ no room
        v
    [ waiting ] <──look── at most 2 ms per peer after a change: a Free, a MarkPrefillCompleted,
        │                 a heartbeat, of this replica or of a peer
        └──> first and room: routes · waited too long, or the queue is full: 503 · client gone: out

Nothing polls: a look wakes only the first request of each lane, and only after a change. Every request that
leaves the queue, for any reason, causes a look for the next one. All replicas see a change at the same
instant. Each waits for another random time, so that the first one's booking arrives before the next one
looks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvrouter.core.audit.problems import never_full
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.admission import SPARE, AdmissionQueue, AdmissionSettings, Ticket
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.ids import PoolId
from kvrouter.errors import QueueFullError, QueueTimeoutError
from kvrouter.frontend.keys.clients import ClientKeys
from kvrouter.telemetry.metrics import Sample, Spread

# With 1,000 tenants at work the look for the one that was served least takes 1 ms.
LEAST_EVERY_S = 0.05


@dataclass(slots=True)
class _Line:
    """One pool's queue, the events that wake its requests, and the timer of the next look."""

    queue: AdmissionQueue
    woken: dict[Ticket, asyncio.Event] = field(default_factory=dict)
    look: asyncio.TimerHandle | None = None


class WaitingRoom:
    """The queues of one replica's pools. `chance()` returns a number in [0, 1)."""

    def __init__(
        self,
        replica: Replica,
        settings: AdmissionSettings,
        waits: Spread,
        chance: Callable[[], float],
        keys: ClientKeys | None = None,
    ) -> None:
        self._replica = replica
        self.is_on = settings.threshold > 0
        self._settings = settings
        self._waits = waits
        self._chance = chance
        self._keys = keys or ClientKeys()
        self._lines: dict[PoolId, _Line] = {}
        self._least, self._looks_at = "", 0.0

    def change(self, settings: AdmissionSettings) -> None:
        """Use these settings. A queue that is on stays on, one that is off stays off."""
        self._settings = settings
        for line in self._lines.values():
            line.queue.settings = settings
            self._look_soon(line)  # a higher threshold may admit the first one now

    async def admitted(self, router: Router, request: RouteRequest) -> None:
        """Return when the request may be routed; the caller routes before it awaits anything else.

        A request that names its target does not wait. Raises QueueFullError or QueueTimeoutError.
        """
        if not self.is_on or request.wanted is not None:
            return
        line = self._line(router.pool.id)
        now = asyncio.get_running_loop().time()
        lane = router.lane(request, now)
        # A newcomer must not overtake requests of its lane that wait for the next look.
        if not line.queue.is_waited_in(lane) and self._has_room(line, router, request, now):
            return
        ticket = self._join(line, now, request, lane)
        outcome = "left"  # stays if the task is cancelled: the client left
        try:
            await self._wait(line, ticket, router, request)
            outcome = "admitted"
        except QueueTimeoutError:
            outcome = "timeout"
            raise
        finally:
            self._leave(line, ticket, outcome)

    def wake(self) -> None:
        """Look soon: bookings or workers have changed. Costs next to nothing while no request waits."""
        for line in self._lines.values():
            self._look_soon(line)

    def view(self, pool_id: PoolId) -> dict[str, Any]:
        """A pool's queue, for /workers."""
        queue, pool = self._line(pool_id).queue, self._replica.routers[pool_id].pool
        wait_s = queue.longest_wait_s(asyncio.get_running_loop().time())
        return {
            "waiting": len(queue),
            "longest_wait_s": round(wait_s, 3),
            "never_full": never_full(pool) if queue.is_on else [],
        }

    def waiting(self) -> int:
        """Requests that wait, in all pools."""
        return sum([len(line.queue) for line in self._lines.values()])

    def samples(self) -> Iterator[Sample]:
        for pool_id in self._replica.routers if self.is_on else ():
            labels, view = {"pool": str(pool_id)}, self.view(pool_id)
            length, longest_s = view["waiting"], view["longest_wait_s"]
            yield "kvrouter_queue_length", labels, length
            yield "kvrouter_queue_longest_wait_seconds", labels, longest_s

    def _line(self, pool_id: PoolId) -> _Line:
        line = self._lines.get(pool_id)
        if line is None:
            line = self._lines[pool_id] = _Line(AdmissionQueue(self._settings, self._served, self._halvings))
        return line

    def _halvings(self) -> int:
        return self._replica.tenants.halvings

    def _served(self, tenant: str) -> float:
        """What the tenant was served, by its weight."""
        keys = self._keys.now
        if not tenant or keys is None:
            return 0.0
        return self._replica.tenants.served(tenant) / keys.weights.get(tenant, 1.0)

    def _join(self, line: _Line, now: float, request: RouteRequest, lane: str) -> Ticket:
        tenant = "" if request.charge is None else request.charge.tenant
        try:
            ticket = line.queue.join(now, request.priority, lane, tenant)
        except QueueFullError as error:
            self._waits.observe(0, "full")
            error.retry_after_s = self._retry_after_s(line, now)
            raise
        line.woken[ticket] = asyncio.Event()
        return ticket

    async def _wait(self, line: _Line, ticket: Ticket, router: Router, request: RouteRequest) -> None:
        loop, woken = asyncio.get_running_loop(), line.woken[ticket]
        try:
            async with asyncio.timeout(self._settings.max_wait_s):
                while not self._admit(line, ticket, router, request):
                    await woken.wait()
                    woken.clear()
        except TimeoutError:
            waited_s = self._settings.max_wait_s
            error = QueueTimeoutError(f"all workers have been busy for {waited_s:g} s; try again later")
            error.retry_after_s = self._retry_after_s(line, loop.time())
            raise error from None

    def _admit(self, line: _Line, ticket: Ticket, router: Router, request: RouteRequest) -> bool:
        now = asyncio.get_running_loop().time()
        for before in line.queue.in_turn(ticket.lane):
            spare = self._spare(before.tenant, now)
            has_room = not router.must_wait(request, now, line.queue, spare=spare)
            if before == ticket:
                return line.queue.admit(ticket, has_room=has_room, overtakes=True)
            if has_room or not spare:
                return False  # it waits for nothing but its look, or for what this one waits for, too
        return False

    def _has_room(self, line: _Line, router: Router, request: RouteRequest, now: float) -> bool:
        tenant = "" if request.charge is None else request.charge.tenant
        spare = self._spare(tenant, now)
        return not router.must_wait(request, now, line.queue, spare=spare)

    def _spare(self, tenant: str, now: float) -> int:
        """How many targets the tenant leaves idle: some, if another one at work was served less."""
        least = self._least_served(now) if tenant else ""
        if not least or self._served(least) >= self._served(tenant):
            return 0
        return 2 * SPARE if self._replica.sharing_peers() else SPARE

    def _leave(self, line: _Line, ticket: Ticket, outcome: str) -> None:
        """Leave the queue. A timer makes the look, so the caller books before the next request is woken."""
        line.queue.leave(ticket)
        del line.woken[ticket]
        waited_s = asyncio.get_running_loop().time() - ticket.arrived
        self._waits.observe(waited_s, outcome)
        self._look_soon(line)

    def _look_soon(self, line: _Line) -> None:
        if line.look is None and len(line.queue):
            # Replicas without sync do not see each other's bookings: waiting for them would gain nothing.
            loop, peers = asyncio.get_running_loop(), self._replica.sharing_peers()
            yields = bool(peers and self._keys.now) and self._yields(line, loop.time())
            delay_s = line.queue.wake_after_s(peers, self._chance(), place=self._place() if yields else None)
            line.look = loop.call_later(delay_s, self._look, line)

    def _yields(self, line: _Line, now: float) -> bool:
        """Whether a tenant that was served less than all that are first here may wait at a peer."""
        return all(self._spare(ticket.tenant, now) for ticket in line.queue.firsts())

    def _place(self) -> int:
        """In the order of replicas, which is another one each second."""
        ids = sorted([self._replica.router_id, *self._replica.peers.credible()])
        return (ids.index(self._replica.router_id) + int(time.time())) % len(ids)

    def _least_served(self, now: float) -> str:
        """The tenant at work that was served least, of late; empty: none is."""
        if now >= self._looks_at:
            self._looks_at = now + LEAST_EVERY_S
            self._least = min(self._replica.tenants.active(now), key=self._served, default="")
        return self._least

    def _look(self, line: _Line) -> None:
        line.look = None
        now = asyncio.get_running_loop().time()
        for lane in line.queue.lanes():
            for ticket in line.queue.in_turn(lane):
                line.woken[ticket].set()
                if not self._spare(ticket.tenant, now):
                    break  # nobody overtakes it

    def _retry_after_s(self, line: _Line, now: float) -> int:
        """The longest wait so far shows how fast the queue moves."""
        return max(1, math.ceil(line.queue.longest_wait_s(now)))
