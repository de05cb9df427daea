"""One worker as its card and heartbeats describe it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.core.wire.heartbeats import Card, RankBeat, State, WorkerBeat
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import TIERS


@dataclass(slots=True)
class Worker:
    """One worker as its card and heartbeats describe it."""

    card: Card
    incarnation: int = 0
    state: State = "up"
    ranks: dict[int, RankBeat] = field(default_factory=dict)
    card_seen: tuple[int, int] = (0, 0)
    """Incarnation and version of the card."""
    silent: bool = False
    """Its lease has ended; it is kept because the pool has no other target."""

    def targets(self) -> list[Target]:
        return [Target(WorkerId(self.card.worker_id), rank) for rank in range(self.card.ranks)]

    def knows_card_of(self, beat: WorkerBeat) -> bool:
        """Whether this is the card that the heartbeat refers to."""
        return self.card_seen == (beat.incarnation, beat.card_version)

    def tier_sets(self) -> int:
        """The number of nested tier sets that it publishes."""
        return 1 + max((TIERS.index(tier) for tier in self.card.tiers if tier in TIERS), default=0)

    def capacity_blocks(self) -> int:
        """The blocks that one rank can hold over all tiers; 0 if a tier's capacity is unknown."""
        capacities = self.card.tiers.values()
        return sum(capacities) if all(capacities) else 0
