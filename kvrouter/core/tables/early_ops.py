"""What peers say of workers whose cards have not arrived yet, until the cards come.

    SentText, ApproxEntry of an unknown worker ──hold──> the worker's card ──take──> the tables
                                                   └──── no card for a lease ──────> dropped

A joining replica receives its peers' snapshots and the workers' cards in any order. Without a card nothing
is assumed of a worker: its block size is unknown, and nothing would ever drop what it holds.

What is said of a worker that has just left is dropped: it was sent before its sender knew.

Invariant: `held_bytes` is the sum of the held ops' sizes, and at most MOST_BYTES.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import ApproxEntry, SentText

# The snapshots of all peers fit: cards come within 50 ms of a hello, most of them before the snapshots.
MOST_BYTES = 8 * 1024 * 1024
# Workers at a time. Anyone with permission to publish can invent names.
MOST_WORKERS = 16_384
# What a held op takes besides its hashes or its text.
_OP_BYTES = 200


@dataclass(slots=True)
class _Held:
    """The ops about one worker, with the times of their arrival; `has_left`: they are dropped."""

    has_left: bool = False
    rounds: int = 0
    ops: list[tuple[ApproxEntry | SentText, float]] = field(default_factory=list)


class EarlyOps:
    """Ops about workers without a card."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.dropped = 0
        """Ops for which there was no room."""
        self._workers: dict[WorkerId, _Held] = {}

    def hold(self, op: ApproxEntry | SentText, now: float) -> None:
        """Keep the op until the card of its worker arrives."""
        worker_id, size = WorkerId(op.worker_id), _bytes(op)
        held = self._workers.get(worker_id)
        if held is not None and held.has_left:
            return
        if self.held_bytes + size > MOST_BYTES or (held is None and len(self._workers) >= MOST_WORKERS):
            self.dropped += 1
            return
        if held is None:
            held = self._workers[worker_id] = _Held()
        held.ops.append((op, now))
        self.held_bytes += size

    def take(self, worker_id: WorkerId, now: float) -> list[ApproxEntry | SentText]:
        """The worker's card has arrived: its ops, oldest first, with the time to live that is left."""
        held = self._workers.get(worker_id)
        if held is None:
            return []
        self._drop(worker_id)
        left = [_aged(op, now - arrived) for op, arrived in held.ops]
        return [op for op in left if op is not None]

    def left(self, worker_id: WorkerId) -> None:
        """The worker has left or is lost: for a lease, nothing is held for it."""
        self._drop(worker_id)
        if len(self._workers) < MOST_WORKERS:
            self._workers[worker_id] = _Held(has_left=True)

    def next_round(self, lease_rounds: int) -> None:
        """A round of the leases has passed."""
        for worker_id, held in list(self._workers.items()):
            held.rounds += 1
            if held.rounds > lease_rounds:
                self._drop(worker_id)

    def _drop(self, worker_id: WorkerId) -> None:
        held = self._workers.pop(worker_id, None)
        if held is not None:
            self.held_bytes -= sum(_bytes(op) for op, _ in held.ops)


def _bytes(op: ApproxEntry | SentText) -> int:
    return _OP_BYTES + (len(op.text) if isinstance(op, SentText) else len(op.hashes))


def _aged(op: ApproxEntry | SentText, held_s: float) -> ApproxEntry | SentText | None:
    """The op after `held_s`; None if its time is over. A time of 0 never ends."""
    if isinstance(op, SentText) or not op.ttl_ms:
        return op
    left_ms = op.ttl_ms - math.floor(held_s * 1000)
    return replace(op, ttl_ms=left_ms) if left_ms > 0 else None
