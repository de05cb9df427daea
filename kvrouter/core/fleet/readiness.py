"""Whether a replica knows enough to get traffic: once it does, it does for ever.

hello ──> answers of workers and replicas ──> first recoveries ──> ready
                 │
                 └─ a replica's answer names the workers it hears; those are waited for too,
                    each until it is heard or as long as a lease lasts

And whether it should get traffic that its peers can serve and it cannot: `ServedElsewhere`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.pool import NAMED_MOST
from kvrouter.core.wire.heartbeats import RouterBeat
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.senders import Feed, name

HELLO_S = 0.2
"""Everyone answers a hello within 50 ms; who is slower has to be named by somebody who is not."""
AWAITED_MOST = 4096
"""Workers that are waited for, and named in one heartbeat (270 KB)."""


class Readiness:
    """What is still missing, until nothing is."""

    def __init__(self) -> None:
        self.is_ready = False
        self._hello_at: float | None = None
        self._awaited: dict[WorkerId, RouterId] = {}

    def hello_sent(self, now: float) -> None:
        """A hello has gone out (again, after a reconnect)."""
        if self._hello_at is None:
            self._hello_at = now

    def wait_for(self, workers: Iterable[WorkerId], known_to: RouterId) -> None:
        """A replica hears these workers, and they have not been heard here."""
        for worker_id in workers:
            if len(self._awaited) < AWAITED_MOST:
                self._awaited.setdefault(worker_id, known_to)

    def is_waiting_for(self, worker_id: WorkerId) -> bool:
        """Whether its card is missing."""
        return worker_id in self._awaited

    def met(self, worker_id: WorkerId) -> None:
        """It is known now, or gone."""
        self._awaited.pop(worker_id, None)

    def missing(self, has_worker: bool, readers: Mapping[Feed, FeedReader], now: float) -> list[str]:
        """Why this replica should not get traffic yet; empty once it was ready, and for ever after."""
        if self.is_ready:
            return []
        reasons = [*self._greetings(has_worker, now), *self._absent(), *behind(readers)]
        self.is_ready = not reasons
        return reasons

    def _greetings(self, has_worker: bool, now: float) -> Iterator[str]:
        if self._hello_at is None:
            yield "not connected to NATS yet"
        elif now < self._hello_at + HELLO_S:
            yield "waiting for the answers to hello"
        if not has_worker:
            yield "no worker has been seen"

    def _absent(self) -> Iterator[str]:
        for worker_id, router_id in list(self._awaited.items())[:NAMED_MOST]:
            yield f"worker {worker_id}, known to replica {router_id}, has not been heard"
        if len(self._awaited) > NAMED_MOST:
            yield f"nor have {len(self._awaited) - NAMED_MOST} other workers"


class ServedElsewhere:
    """Whether other replicas serve all pools that this one does, and more, for at least a lease.

        this one  {a}
        peer 1    {a, b}    clients of b are better off there: after a lease this one is not ready
        peer 2    {b}       does not count: clients of a would lose as much as those of b gain

    "Serves all and more" has no circles, so the replica that serves most stays ready: all of them are never
    unready at once. A peer counts only while it takes clients' requests: up, and with an address. Rounds are
    those of the leases: a replica that is cut off counts none, so stale heartbeats cannot make it unready.
    """

    def __init__(self) -> None:
        self._rounds = 0

    def next_round(self, own: Set[str], peers: Mapping[RouterId, RouterBeat]) -> None:
        """A round of the leases has passed."""
        self._rounds = self._rounds + 1 if any(_serve_more(own, peers)) else 0

    def pools(
        self, own: Set[str], peers: Mapping[RouterId, RouterBeat], lease_rounds: int
    ) -> dict[PoolId, list[RouterId]]:
        """The pools, and who serves them; none before it has been so for a lease."""
        served: dict[PoolId, list[RouterId]] = {}
        if self._rounds >= lease_rounds:
            for router_id in _serve_more(own, peers):
                for pool_id in sorted(peers[router_id].serves.keys() - own)[:NAMED_MOST]:
                    served.setdefault(PoolId(pool_id), []).append(router_id)
        return served


def _serve_more(own: Set[str], peers: Mapping[RouterId, RouterBeat]) -> Iterator[RouterId]:
    for router_id, beat in peers.items():
        if beat.state == "up" and beat.address and beat.serves.keys() > own:
            yield router_id


def sizes_of_elders(
    peers: Mapping[RouterId, RouterBeat], incarnation: int, router_id: RouterId
) -> dict[str, int]:
    """The block size of each pool at the eldest peer that serves it, of the peers older than this replica."""
    older = [
        (beat.incarnation, peer_id, beat.serves)
        for peer_id, beat in peers.items()
        if (beat.incarnation, peer_id) < (incarnation, router_id)
    ]
    sizes: dict[str, int] = {}
    for _, _, serves in sorted(older, key=lambda peer: peer[:2], reverse=True):
        sizes |= serves
    return sizes


def behind(readers: Mapping[Feed, FeedReader]) -> Iterator[str]:
    """The feeds that are not in step."""
    for source, reader in readers.items():
        if reader.state is not FeedState.LIVE:
            yield f"{name(source)}: {reader.state.value}, {reader.lag} frames behind"
