"""Whether a replica knows enough to get traffic. Once ready, it stays ready.

hello ──> answers of workers and replicas ──> first recoveries ──> ready
                 │
                 └─ a replica's answer names the workers it knows; each is awaited too,
                    until its heartbeat arrives or for a lease

`ServedElsewhere`: whether a replica should get no traffic because its peers serve pools that it cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.pool import NAMED_MOST
from kvrouter.core.wire.heartbeats import RouterBeat
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.senders import Feed, name

# Replicas and agents answer a hello within 50 ms. A slower agent is awaited if a replica names its worker.
HELLO_S = 0.2
# The most workers that a replica awaits, and names in one heartbeat (270 KB).
AWAITED_MOST = 4096


class Readiness:
    """What a joining replica still lacks."""

    def __init__(self) -> None:
        self.is_ready = False
        self._hello_at: float | None = None
        self._awaited: dict[WorkerId, RouterId] = {}

    def hello_sent(self, now: float) -> None:
        """A hello was published, maybe once more after a reconnect."""
        if self._hello_at is None:
            self._hello_at = now

    def wait_for(self, workers: Iterable[WorkerId], known_to: RouterId) -> None:
        """A replica knows these workers, and no heartbeat of them has arrived here."""
        for worker_id in workers:
            if len(self._awaited) < AWAITED_MOST:
                self._awaited.setdefault(worker_id, known_to)

    def is_waiting_for(self, worker_id: WorkerId) -> bool:
        """Whether the worker is awaited: its card is missing."""
        return worker_id in self._awaited

    def met(self, worker_id: WorkerId) -> None:
        """The worker is known now, or gone."""
        self._awaited.pop(worker_id, None)

    def missing(self, has_worker: bool, readers: Mapping[Feed, FeedReader], now: float) -> list[str]:
        """Why this replica should not get traffic yet; always empty after it was ready once."""
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
            yield f"no heartbeat of worker {worker_id} yet, which replica {router_id} knows"
        if len(self._awaited) > NAMED_MOST:
            yield f"no heartbeat of {len(self._awaited) - NAMED_MOST} other workers yet"


class ServedElsewhere:
    """Whether other replicas serve all pools that this one does, and more, for at least a lease.

        this one  {a}
        peer 1    {a, b}    clients of b are served there: after a lease this one is not ready
        peer 2    {b}       does not count: clients of a would lose as much as those of b gain

    "Serves all and more" cannot be circular, so the replica that serves most stays ready: they are never all
    unready at once. A peer counts only while it takes clients' requests: up, and with an address. Rounds are
    those of the leases: a replica that is cut off has none, so stale heartbeats cannot make it unready.
    """

    def __init__(self) -> None:
        self._rounds = 0

    def next_round(self, own: Set[str], peers: Mapping[RouterId, RouterBeat]) -> None:
        """A round of the leases has passed."""
        self._rounds = self._rounds + 1 if any(_serve_more(own, peers)) else 0

    def pools(
        self, own: Set[str], peers: Mapping[RouterId, RouterBeat], lease_rounds: int
    ) -> dict[PoolId, list[RouterId]]:
        """Pools that only peers serve, with those peers; empty until it was so for a lease."""
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
    """The block size of each pool at the eldest peer that serves it and is older than this replica."""
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
    """Sentences about the feeds that are not live."""
    for source, reader in readers.items():
        if reader.state is not FeedState.LIVE:
            yield f"{name(source)}: {reader.state.value}, {reader.lag} frames behind"
