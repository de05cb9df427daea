"""What peers say of workers whose cards have not arrived yet, until the cards come.

    SentText, ApproxEntry, Bind of an unknown worker ──hold──> the worker's card ──take──> the tables
                                                         └──── no card for a lease ──────> dropped

A joining replica receives its peers' snapshots and the workers' cards in any order. Without a card nothing
is assumed of a worker: its block size is unknown, and nothing would ever drop what it holds.

What is said of a worker that has just left is dropped: it was sent before its sender knew.

Invariant: `held_bytes` is the sum of the held ops' sizes, at most MOST_BYTES, and a part of the budget's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import ApproxEntry, Bind, SentText

EarlyOp: TypeAlias = SentText | ApproxEntry | Bind

# The snapshots of all peers fit: cards come within 50 ms of a hello, most of them before the snapshots.
MOST_BYTES = 8 * 1024 * 1024
# Of all pools: anyone with permission to publish can invent some.
MOST_BYTES_OF_ALL = 4 * MOST_BYTES
# Of these, sessions in a pool: losing them costs least.
MOST_BIND_BYTES = MOST_BYTES // 2
# Workers at a time. Anyone with permission to publish can invent names.
MOST_WORKERS = 16_384
# What a held op takes besides its hashes, its text or its session.
_OP_BYTES = 200


@dataclass(slots=True)
class _EarlyOps:
    """The ops about one worker, with the times of their arrival; `has_left`: they are dropped."""

    has_left: bool = False
    rounds: int = 0
    ops: list[tuple[EarlyOp, float]] = field(default_factory=list)
    binds: dict[str, tuple[Bind, float]] = field(default_factory=dict)
    """By session: each peer's snapshot repeats the same ones."""

    def everything(self) -> Iterator[tuple[EarlyOp, float]]:
        """All ops; sessions last."""
        yield from self.ops
        yield from self.binds.values()


@dataclass(slots=True)
class EarlyBudget:
    """What the pools of a replica hold together."""

    used_bytes: int = 0


class EarlyOps:
    """Ops of one pool about workers without a card."""

    def __init__(self, budget: EarlyBudget | None = None) -> None:
        self.held_bytes = 0
        self._bind_bytes = 0
        self._budget = budget or EarlyBudget()
        self.dropped = 0
        """Ops for which there was no room."""
        self._workers: dict[WorkerId, _EarlyOps] = {}

    def hold(self, op: EarlyOp, now: float) -> None:
        """Keep the op until the card of its worker arrives."""
        worker_id, size = WorkerId(op.worker_id), _bytes(op)
        held = self._workers.get(worker_id)
        if held is not None and held.has_left:
            return
        if isinstance(op, Bind) and held is not None and op.session in held.binds:
            held.binds[op.session] = (op, now)
            return
        has_room = self.held_bytes + size <= MOST_BYTES
        if isinstance(op, Bind):
            has_room = has_room and self._bind_bytes + size <= MOST_BIND_BYTES
        has_room = has_room and self._budget.used_bytes + size <= MOST_BYTES_OF_ALL
        if not has_room or (held is None and len(self._workers) >= MOST_WORKERS):
            self.dropped += 1
            return
        if held is None:
            held = self._workers[worker_id] = _EarlyOps()
        if isinstance(op, Bind):
            held.binds[op.session] = (op, now)
            self._bind_bytes += size
        else:
            held.ops.append((op, now))
        self._count(size)

    def take(self, worker_id: WorkerId, now: float) -> list[EarlyOp]:
        """The worker's card has arrived: its ops, oldest first, with the time to live that is left."""
        held = self._workers.get(worker_id)
        if held is None:
            return []
        self._drop(worker_id)
        left = [_aged(op, now - arrived) for op, arrived in held.everything()]
        return [op for op in left if op is not None]

    def left(self, worker_id: WorkerId) -> None:
        """The worker has left or is lost: for a lease, nothing is held for it."""
        self._drop(worker_id)
        if len(self._workers) < MOST_WORKERS:
            self._workers[worker_id] = _EarlyOps(has_left=True)

    def next_round(self, lease_rounds: int) -> None:
        """A round of the leases has passed."""
        for worker_id, held in list(self._workers.items()):
            held.rounds += 1
            if held.rounds > lease_rounds:
                self._drop(worker_id)

    def clear(self) -> None:
        """Drop all: the pool ends."""
        self._workers.clear()
        self._bind_bytes = 0
        self._count(-self.held_bytes)

    def _count(self, size: int) -> None:
        self.held_bytes += size
        self._budget.used_bytes += size

    def _drop(self, worker_id: WorkerId) -> None:
        held = self._workers.pop(worker_id, None)
        if held is not None:
            self._bind_bytes -= sum(_bytes(op) for op, _ in held.binds.values())
            self._count(-sum(_bytes(op) for op, _ in held.everything()))


def _bytes(op: EarlyOp) -> int:
    match op:
        case SentText():
            return _OP_BYTES + len(op.text)
        case Bind():
            return _OP_BYTES + len(op.session) * (1 if op.session.isascii() else 4)
        case ApproxEntry():
            return _OP_BYTES + len(op.hashes)


def _aged(op: EarlyOp, held_s: float) -> EarlyOp | None:
    """The op after `held_s`; None if its time is over. A time of 0 never ends."""
    if isinstance(op, SentText) or not op.ttl_ms:
        return op
    left_ms = op.ttl_ms - math.floor(held_s * 1000)
    return replace(op, ttl_ms=left_ms) if left_ms > 0 else None
