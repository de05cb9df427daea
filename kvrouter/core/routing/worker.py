"""One worker as its card and heartbeats describe it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.core.routing.first_answers import FirstAnswers
from kvrouter.core.wire.heartbeats import Card, RankBeat, State, WorkerBeat
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import TIERS


@dataclass(slots=True)
class Worker:
    """One worker as its card and heartbeats describe it. A new card makes a new Worker."""

    card: Card
    incarnation: int = 0
    state: State = "up"
    ranks: dict[int, RankBeat] = field(default_factory=dict)
    card_seen: tuple[int, int] = (0, 0)
    """Incarnation and version of the card."""
    silent: bool = False
    """Its lease has ended; it is kept because the pool has no other target."""
    has_equal_ids: bool | None = None
    """Whether the token ids of chats that are computed here are its engine's; None: not compared."""
    shapes: dict[bytes, bool] = field(default_factory=dict)
    """The same of chats of each shape (tokens/id_comparison.py) that was compared."""
    is_engine: bool = False
    """Whether it has given a good answer that came from no router."""
    first_answers: FirstAnswers = field(default_factory=FirstAnswers)
    card_bytes: int = 0
    """About what the card takes (core/fleet/refusals.py). Computed once: each heartbeat asks."""
    # Blocks that one rank can hold over all tiers; 0 if a tier's capacity is unknown. Computed once, because
    # each Stored of its feeds is compared with it.
    capacity_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        capacities = self.card.tiers.values()
        self.capacity_blocks = sum(capacities) if all(capacities) else 0

    @property
    def sends_token_ids(self) -> bool:
        """Whether its engine gets the token ids of chats that are computed here."""
        return self.has_equal_ids is True and self.card.takes_token_ids

    def targets(self) -> list[Target]:
        return [Target(WorkerId(self.card.worker_id), rank) for rank in range(self.card.ranks)]

    def knows_card_of(self, beat: WorkerBeat) -> bool:
        """Whether this is the card that the heartbeat refers to."""
        return self.card_seen == (beat.incarnation, beat.card_version)

    def differs_in_load(self, beat: WorkerBeat) -> bool:
        """Whether the heartbeat tells of nothing else but the load and the seqs of the feeds."""
        is_same = beat.card is None and beat.state == self.state and beat.incarnation == self.incarnation
        return is_same and not self.silent and self.knows_card_of(beat)

    def has_lost_cache(self, beat: WorkerBeat) -> bool:
        """Whether the heartbeat says that the engine is gone, or is another process than so far.

        If an agent starts again and its engine does not report its start, that is assumed: an undercount is
        allowed, an overcount never.
        """
        if beat.state == "down":
            return self.state != "down"
        if beat.card is None:
            return False
        before, now = self.card.engine_started_at_us, beat.card.engine_started_at_us
        return before != now if before and now else self.card_seen[0] != beat.incarnation

    def tier_sets(self) -> int:
        """The number of nested tier sets that it publishes."""
        return 1 + max((TIERS.index(tier) for tier in self.card.tiers if tier in TIERS), default=0)
