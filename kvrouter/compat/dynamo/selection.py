"""`SelectionService`: Dynamo's selection service inside its caller's process, such as Ray's ingress replicas.

Each one is a replica on NATS. What one reserves, all others count, with repairs and snapshots. Of those that
register the same engine, one acts as its agent (kvrouter/router/workers.py).

    ingress A: select_and_reserve ──booked here──NATS──> a copy at B
    ingress B: create_reservation (A's broadcast) ──> counted already: nothing is booked twice
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from kvrouter.bus.embedded import DEFAULT_URL
from kvrouter.client.membership import joined, replica_with
from kvrouter.compat.dynamo.runtime import Ended, HeldEndpoint
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.errors import UnknownReservationError
from kvrouter.frontend.server.background import running
from kvrouter.policies import PolicySettings, new_policy
from kvrouter.replica.loop import first_turn
from kvrouter.router.asked import PlacementAsk
from kvrouter.router.bodies import decoded
from kvrouter.router.placing import Placing
from kvrouter.router.registrations import Registration
from kvrouter.router.reservations import Reservations
from kvrouter.router.workers import RegisteredEngines

T = TypeVar("T")

log = structlog.get_logger()

# A request of which nothing was heard for this long has ended unnoticed. If the process dies, its bookings
# end with the replica's own lease.
LEASE_S = 600.0
# The same for a worker that the caller names: it may be a peer's request that has ended by now.
NAMED_LEASE_S = 60.0
# A peer's broadcast may come before its booking, which takes a few ms.
SEEN_WITHIN_S, LOOK_S = 0.05, 0.005
MOST_ELSEWHERE = 1 << 16
_CALLER = "this process"


@dataclass(frozen=True, slots=True)
class _Service:
    replica: Replica
    placing: Placing
    engines: RegisteredEngines


class SelectionService:
    """It joins NATS at the first await: KVROUTER_NATS, else NATS_SERVER or NATS_URL; KVROUTER_NAMESPACE.

    `indexer_threads` and other arguments of Dynamo's have no meaning here. Worker ids are numbers, as there.
    """

    def __init__(self, indexer_threads: int = 1, **_not_needed: object) -> None:
        names = ("KVROUTER_NATS", "NATS_SERVER", "NATS_URL")
        self._nats = next(filter(None, map(os.environ.get, names)), DEFAULT_URL)
        self._namespace = os.environ.get("KVROUTER_NAMESPACE") or "default"
        self._held = HeldEndpoint(self._opened)
        self._service: _Service | None = None
        self._elsewhere: dict[str, None] = {}  # reservations of peers that callers report on here, too

    async def upsert_worker(self, worker: Mapping[str, Any]) -> dict[str, Any]:
        """Register an engine, or replace what is known of it."""
        spec, service = _read(worker, Registration), await self._held.get()
        await service.engines.upsert(spec)
        return {"worker_id": spec.worker_id}

    async def delete_worker(self, worker_id: int | str) -> None:
        """The engine is gone, and its requests with it."""
        service = await self._held.get()
        await service.engines.delete(str(worker_id))
        service.placing.free_worker(str(worker_id))

    async def select(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The best worker; nothing is booked."""
        return await (await self._held.get()).placing.select(_read(request, PlacementAsk))

    async def select_and_reserve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The best worker, booked in the same step."""
        return await (await self._held.get()).placing.reserve(_read(request, PlacementAsk), _CALLER)

    async def create_reservation(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Book a kept selection, or the worker that is named.

        What a peer has booked under this id is counted here already, so only its later calls are expected.
        """
        asked, service = _read(request, PlacementAsk), await self._held.get()
        if asked.worker_id is None:
            return service.placing.reserve_kept(asked, _CALLER)
        if asked.id is not None and await _is_elsewhere(service.replica, asked.id):
            self._elsewhere[asked.id] = None
            if len(self._elsewhere) > MOST_ELSEWHERE:
                del self._elsewhere[next(iter(self._elsewhere))]
            return {"selection_id": asked.id, "reservation_id": asked.id, "worker_id": asked.worker_id}
        asked = replace(asked, lease_s=asked.lease_s or NAMED_LEASE_S)
        return await service.placing.reserve(asked, _CALLER)

    async def prefill_complete(self, selection_id: str) -> None:
        """The first token has come."""
        placing = (await self._held.get()).placing
        if selection_id not in self._elsewhere:
            placing.prefill_complete(selection_id)

    def add_output_block(self, selection_id: str, decay_fraction: float | None = None) -> None:
        """The answer has filled one more block. `decay_fraction`: not needed, blocks count until the end."""
        if selection_id in self._elsewhere:
            return
        if self._service is None:
            raise UnknownReservationError(
                f"no reservation {selection_id!r} yet: await select_and_reserve first"
            )
        self._service.placing.progress(selection_id)

    async def free_reservation(self, selection_id: str) -> None:
        """The request has ended, in any way."""
        placing = (await self._held.get()).placing
        if selection_id in self._elsewhere:
            del self._elsewhere[selection_id]
            return
        placing.free(selection_id)

    def shutdown(self) -> Ended:
        """Leave NATS: peers drop what was booked here, and take over its engines.

        Await the result to wait for it.
        """
        return Ended(self._held.close())

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[_Service]:
        replica = replica_with(
            lambda: _policy("kv"), ReplicaSettings(PoolSettings(), synced=True), new_mode=_policy
        )
        async with joined(replica, self._nats, self._namespace) as replica_loop:
            table, loop = Reservations(), asyncio.get_running_loop()
            publish = replica_loop.publishing.flush_soon
            placing = Placing(replica, table, publish, loop.time, lease_s=LEASE_S)
            engines = RegisteredEngines(replica, self._nats, self._namespace)
            self._service = _Service(replica, placing, engines)
            try:
                async with running({"reservations": placing.expire_forever()}):
                    yield self._service
            finally:
                self._service = None
                await engines.close()


def _policy(mode: str) -> Any:
    return new_policy(mode, PolicySettings(), first_turn())


async def _is_elsewhere(replica: Replica, request_id: str) -> bool:
    """Whether a peer has booked the request: now, or in a moment."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SEEN_WITHIN_S
    while True:
        if _has_peer_booked(replica, request_id):
            return True
        if loop.time() >= until:
            return False
        await asyncio.sleep(LOOK_S)


def _has_peer_booked(replica: Replica, request_id: str) -> bool:
    for router in replica.routers.values():
        active = router.pool.active
        for owner in active.owners().keys() - {replica.router_id}:
            if any(one.request_id == request_id for one in active.bookings(owner)):
                return True
    return False


def _read(body: Mapping[str, Any], kind: type[T]) -> T:
    """The same checks as over HTTP."""
    return decoded(msgspec.json.encode(dict(body)), kind)
