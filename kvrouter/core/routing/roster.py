"""The targets that take requests, in columns: a target has the same place in every column.

    place      0        1        2
    targets    w1/0     w2/0     w2/1        ordered by name
    workers    w1       w2       w2
    beats      …        …        …           what each rank last reported

A decision keeps the columns it was made from, so a column that was handed out never changes: a change of the
targets makes a new roster, and beats are copied before the first change after `beats` was called.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.ids import Target, WorkerId

_NO_BEAT = RankBeat(0, 0, 0)


class Roster:
    """The targets of a pool that may be chosen."""

    def __init__(self, pairs: Iterable[tuple[Target, Worker]] = ()) -> None:
        self.targets: list[Target] = []
        self.workers: list[Worker] = []
        for target, worker in pairs:
            self.targets.append(target)
            self.workers.append(worker)
        self.every_place = range(len(self.targets))
        self.places = {target: place for place, target in enumerate(self.targets)}
        self._beats = [
            worker.ranks.get(target.rank, _NO_BEAT)
            for target, worker in zip(self.targets, self.workers, strict=True)
        ]
        self._are_seen = False
        self.nothing = array("q", bytes(8 * len(self.targets)))
        """A column of zeros, shared by decisions: must not be changed."""

    def __len__(self) -> int:
        return len(self.targets)

    def beats(self) -> list[RankBeat]:
        """What each target last reported. The list does not change after this."""
        self._are_seen = True
        return self._beats

    def update_beats(self, worker: Worker) -> None:
        """A heartbeat of a worker whose targets are the same as before."""
        # Copied at most once between two decisions: a thousand workers send a heartbeat each second.
        if self._are_seen:
            self._beats, self._are_seen = self._beats.copy(), False
        for rank in range(worker.card.ranks):
            place = self.places.get(Target(WorkerId(worker.card.worker_id), rank))
            if place is not None:
                self._beats[place] = worker.ranks.get(rank, _NO_BEAT)
