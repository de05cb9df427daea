"""Which peers' changes of routing a replica follows: the latest that is not too far ahead.

Anybody who may publish on NATS can send a change with the greatest revision, and no operator could send a
later one. So a replica follows a change only if it is at most LEAP ahead of a mark:

    own     the change that it follows now; 0 at the start
    median  the lower median of what the settled replicas follow: more than half of them have reached it.
            A replica that joins, or was cut off, learns high revisions by it

Settled are the replicas that have published heartbeats for two leases. The replica itself then votes too: it
could learn before. If it voted earlier, several replicas that join a single one would outvote it with 0. A
peer heard for less than a lease votes for the own mark: one forged heartbeat moves nothing.

While a replica hears no other settled replica than a forged one, nothing tells forged changes from real ones.
Even then the median counts only up to LEARNT_MOST, so that later changes have room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.core.wire.heartbeats import RouterBeat, RoutingChange
from kvrouter.core.wire.ids import RouterId

# Far more changes than a replica misses in a lease; and a forger needs 2^52 messages to use up all revisions.
LEAP = 1000
# A change a minute for two years; then a reset begins with revision 1.
LEARNT_MOST = 1_000_000


def is_near(change: RoutingChange, mark: tuple[int, int]) -> bool:
    """Whether a change is at most LEAP ahead of an epoch and revision. A new epoch begins with revision 1."""
    epoch, revision = mark
    if change.epoch == epoch:
        return change.revision <= revision + LEAP
    return change.epoch <= epoch + LEAP and change.revision <= LEAP


def follow(
    known: RoutingChange | None, peers: Mapping[RouterId, RouterBeat], marks: Sequence[tuple[int, int]]
) -> RoutingChange | None:
    """The latest change of the peers that is near one of the marks; `known` if none is later."""
    for beat in peers.values():
        change = beat.routing
        if change is not None and change.is_later(known) and any(is_near(change, mark) for mark in marks):
            known = change
    return known


def refused(
    known: RoutingChange | None, peers: Mapping[RouterId, RouterBeat]
) -> dict[RouterId, RoutingChange]:
    """Changes of peers that are later than the one that is followed: they are too far ahead."""
    return {
        router_id: beat.routing
        for router_id, beat in peers.items()
        if beat.routing is not None and beat.routing.is_later(known)
    }


def median(votes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The epoch and revision that more than half of the votes have reached, as a mark; [] for none."""
    reached = sorted(votes)[(len(votes) - 1) // 2 :][:1]
    return [mark for mark in reached if max(mark) <= LEARNT_MOST]
