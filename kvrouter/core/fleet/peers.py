"""The other replicas: their last heartbeats, and what of their words counts here.

    heartbeat ──room?──> kept ──┬── recent: seen within a lease ──┬── credible: its address answers as it
                                │                                 └── claims: pools served there alone
                                └── addresses ──> questions (reached.py), places (places.py)

A peer's bookings count without an answer of its address: one that cannot be reached keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from msgspec.structs import replace

from kvrouter.core.feeds.lease import Leases
from kvrouter.core.fleet.places import ReplicaPlaces
from kvrouter.core.fleet.reached import ReachedPeers
from kvrouter.core.fleet.refusals import HEARD_MOST, PEER_BYTES, PEERS_BYTES, Budget, peer_bytes
from kvrouter.core.fleet.routing_changes import follow, median
from kvrouter.core.wire.heartbeats import RouterBeat, RoutingChange, standing
from kvrouter.core.wire.ids import PoolId, RouterId
from kvrouter.core.wire.senders import RouterSource, Source

# Further ones are ignored and counted: anybody who may publish can invent names.
PEERS_MOST = 1024
# The snapshots of so many of the eldest replicas contain what was learnt from others. One may be gone without
# its peers knowing it yet, and another may be the one whose entries are asked for.
ELDERS = 3
# Of one peer: a heartbeat may name a thousand pools, and nothing of any of them need be true.
CLAIMS_MOST = 16


class Claim(NamedTuple):
    """A replica names a pool that it serves and this one does not."""

    pool_id: PoolId
    router_id: RouterId


class Peers(Mapping[RouterId, RouterBeat]):
    """The last heartbeat of each peer, by its id."""

    def __init__(
        self, router_id: RouterId, incarnation: int, leases: Leases[Source], lease_rounds: int
    ) -> None:
        self.reached = ReachedPeers()
        self.places = ReplicaPlaces(router_id, self.reached)
        self._router_id = router_id
        self._incarnation = incarnation
        self._leases = leases
        self._lease_rounds = lease_rounds
        self._beats: dict[RouterId, RouterBeat] = {}
        self._heard_since: dict[RouterId, int] = {}  # the round of each one's first heartbeat
        self.budget: Budget[RouterId] = Budget(PEER_BYTES, PEERS_BYTES)  # of heartbeats
        self._claimed_rounds: dict[Claim, int] = {}  # for how many rounds each claim was repeated

    def __getitem__(self, router_id: RouterId) -> RouterBeat:
        return self._beats[router_id]

    def __iter__(self) -> Iterator[RouterId]:
        return iter(self._beats)

    def __len__(self) -> int:
        return len(self._beats)

    def take(self, router_id: RouterId, beat: RouterBeat, in_round: int) -> str:
        """Keep a heartbeat; returns why it is not kept, empty if it is."""
        if router_id not in self._beats and len(self._beats) >= PEERS_MOST:
            return f"{PEERS_MOST} others are known"
        kept = replace(beat, workers=[], hears=beat.hears if len(beat.hears or ()) <= HEARD_MOST else None)
        if reason := self.budget.take(router_id, peer_bytes(kept)):
            return reason
        self.places.heard(self._beats.get(router_id), kept)
        self._beats[router_id] = kept
        self._heard_since.setdefault(router_id, in_round)
        return ""

    def drop(self, router_id: RouterId) -> None:
        """The peer has left, or its lease has ended."""
        self.places.heard(self._beats.pop(router_id, None), None)
        self.budget.free(router_id)
        self._heard_since.pop(router_id, None)

    def is_replica(self, router_id: str) -> bool:
        """Whether this replica or a live peer has this id."""
        return router_id == self._router_id or router_id in self._beats

    # Which of them count

    def next_question(self, now: float) -> str:
        """The address of a peer to ask for its router id now; empty if none is due."""
        return self.reached.next(self._beats, now)

    def has_answered(self, router_id: RouterId) -> bool:
        """Whether the peer's address answers as the peer."""
        beat = self._beats.get(router_id)
        return beat is not None and self.reached.is_reached(router_id, beat)

    def has_failed(self, router_id: RouterId) -> bool:
        """Whether the peer's address was asked, and does not answer as the peer."""
        return self.reached.has_failed(router_id, self._beats[router_id])

    def recent(self) -> dict[RouterId, RouterBeat]:
        """Peers seen within the shortest lease: a forged message must not count for a longer one."""
        lease, silent = self._lease_rounds, self._leases.silent_rounds
        return {one: beat for one, beat in self._beats.items() if silent(RouterSource(one)) < lease}

    def credible(self) -> dict[RouterId, RouterBeat]:
        """The recent peers whose addresses have answered as theirs; all recent ones where none has.

        Where the admin listeners are bound to loopback, as by default, other hosts reach none of them.
        """
        recent = self.recent()
        reached = {one: beat for one, beat in recent.items() if self.reached.is_reached(one, beat)}
        return reached or recent

    # What they say

    def is_elder(self) -> bool:
        """Whether this replica is among the ELDERS that started first, as far as it knows."""
        mine = self._incarnation, self._router_id
        return sum((beat.incarnation, one) < mine for one, beat in self.credible().items()) < ELDERS

    def sizes_of_elders(self) -> dict[str, int]:
        """The block size of each pool at the eldest peer that serves it and is older than this replica."""
        older = [
            (beat.incarnation, peer_id, beat.serves)
            for peer_id, beat in self.credible().items()
            if (beat.incarnation, peer_id) < (self._incarnation, self._router_id)
        ]
        sizes: dict[str, int] = {}
        for _, _, serves in sorted(older, key=lambda peer: peer[:2], reverse=True):
            sizes |= serves
        return sizes

    def next_round(self, own: Set[str]) -> None:
        """A round of the leases has passed, while this replica serves its `own` pools.

        A replica that is cut off has no rounds, so stale heartbeats cannot make it unready.
        """
        rounds = self._claimed_rounds
        self._claimed_rounds = {one: rounds.get(one, 0) + 1 for one in self._claims(own)}

    def lasting_claims(self, own: Set[str]) -> list[Claim]:
        """Claims of a lease's age that still hold."""
        now, rounds = set(self._claims(own)), self._claimed_rounds
        return sorted(one for one in now if rounds.get(one, 0) >= self._lease_rounds)

    def _claims(self, own: Set[str]) -> Iterable[Claim]:
        """The pools that peers which take clients' requests serve, and this replica does not."""
        for router_id, beat in self.recent().items():
            if beat.state == "up" and beat.address:
                for pool_id in sorted(beat.serves.keys() - own)[:CLAIMS_MOST]:
                    yield Claim(PoolId(pool_id), router_id)

    def routing(self, known: RoutingChange | None, in_round: int) -> RoutingChange | None:
        """The change to follow after this round: also one far ahead, if most settled replicas follow it."""
        peers, lease = self.credible(), self._lease_rounds
        votes = [
            standing(beat.routing if self._heard_since[router_id] <= in_round - lease else known)
            for router_id, beat in peers.items()
            if beat.round >= 2 * lease
        ]
        if in_round >= 2 * lease:
            votes.append(standing(known))
        return follow(known, peers, [standing(known), *median(votes)])
