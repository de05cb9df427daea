"""Well-formed messages of members that do not exist: replicas, workers, and feeds of both.

Each is what an honest sender could publish, so only what the receiver itself knows shows that it is forged.
Chance is passed in: a seed repeats a run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import (
    Card,
    Heard,
    RankBeat,
    RouterBeat,
    RoutingChange,
    State,
    WorkerBeat,
    encode,
)
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.ops import (
    VERSION,
    AddRequest,
    ApproxEntry,
    Bind,
    Check,
    Frame,
    Free,
    Op,
    SentText,
    Stored,
)
from kvrouter.core.wire.ops import encode as encode_frame
from kvrouter.core.wire.senders import KvSource, RouterSource, Source, SyncSource, WorkerSource

# Names of each kind that come back again and again; the others are used once.
STEADY = 40
NOWHERE = "http://127.0.0.1:9"
_STATES: Sequence[State] = ("up", "up", "up", "up", "down", "draining", "leave")
_INCARNATIONS = (0, 1, 1_700_000_000_000_000, 2**62)
_SEQS = (0, 0, 1, 5, 1000, 2**40, 2**62)
_HOSTS = ("169.254.169.254", "[fe80::1]", "[::ffff:169.254.1.1]", "0.0.0.0", "127.0.0.1:9", "ghost.invalid")


@dataclass(frozen=True, slots=True)
class Real:
    """What there is in the fleet: an attacker that listens knows it."""

    pools: Sequence[PoolId]
    workers: Sequence[WorkerId]
    urls: Sequence[str]
    """Of workers and replicas."""


class Forger:
    """Makes messages in the names of invented members."""

    def __init__(self, rng: random.Random, real: Real) -> None:
        self._rng = rng
        self._real = real

    def message(self) -> tuple[Source, bytes]:
        """The next message, and where to publish it."""
        make = self._rng.choice(
            (self._replica, self._replica, self._worker, self._worker, self._bookings, self._blocks)
        )
        return make()

    def _count(self, most: int) -> int:
        """A few, seldom the most."""
        return most if self._rng.random() < 0.01 else self._rng.randrange(4)

    def _name(self, kind: str) -> str:
        rng = self._rng
        return f"{kind}-{rng.randrange(STEADY) if rng.random() < 0.7 else rng.getrandbits(40)}"

    def _pool(self) -> PoolId:
        return self._rng.choice(self._real.pools) if self._rng.random() < 0.5 else PoolId(self._name("pool"))

    def _worker_id(self) -> str:
        return self._rng.choice(self._real.workers) if self._rng.random() < 0.5 else self._name("ghost")

    def _url(self) -> str:
        rng = self._rng
        return rng.choice((*self._real.urls, NOWHERE, f"http://{rng.choice(_HOSTS)}"))

    def _replica(self) -> tuple[Source, bytes]:
        rng, real = self._rng, self._real
        serves: dict[str, int] = dict.fromkeys(map(str, real.pools if rng.random() < 0.7 else ()), 16)
        serves |= {str(self._pool()): 1 << rng.randrange(8) for _ in range(self._count(300))}
        change = RoutingChange(rng.choice((2**20, 2**62)), "ghost", {"retries": "0"}, epoch=2**61)
        beat = RouterBeat(
            VERSION,
            rng.choice(_INCARNATIONS),
            rng.choice(_STATES),
            self._url(),
            {self._pool(): rng.choice(_SEQS) for _ in range(rng.choice((0, 1, 2)))},
            rng.choice(_SEQS),
            rng.choice((None, 1, 1000, 2**48)),
            [self._name("ghost") for _ in range(self._count(1000))],
            serves,
            change if rng.random() < 0.1 else None,
            {self._name("peer"): Heard(1, 1, 0, 0) for _ in range(self._count(1000))},
            clients_url=self._url(),
        )
        return RouterSource(RouterId(self._name("peer"))), encode(beat)

    def _worker(self) -> tuple[Source, bytes]:
        rng, worker_id = self._rng, WorkerId(self._name("ghost"))
        is_large = rng.random() < 0.01
        card = Card(
            worker_id=worker_id,
            # no engine is there: one that is would serve as a worker, which nobody could tell from a real one
            url=f"http://{rng.choice(_HOSTS)}",
            model=rng.choice(("m", "invented", "x" * 1000)),
            lora_names=tuple(f"adapter-{n}" * 8 for n in range(4000 if is_large else rng.randrange(3))),
            block_size=1 << rng.randrange(8),
            ranks=64 if is_large else rng.choice((1, 1, 2)),
            rank_header=rng.choice(("", "", "X-data-parallel-rank", "x-request-id")),
            notes=("y" * 4000,) * (150 if is_large else rng.randrange(2)),
            publishes_events=rng.random() < 0.7,
            started_at_us=rng.choice(_INCARNATIONS),
        )
        ranks = [RankBeat(n, rng.choice(_INCARNATIONS), rng.choice(_SEQS)) for n in range(rng.randrange(3))]
        state = rng.choice(("down", "draining", "leave") if rng.random() < 0.9 else _STATES)
        beat = WorkerBeat(VERSION, rng.choice(_INCARNATIONS), state, self._pool(), ranks, 1, card, 2**40)
        return WorkerSource(worker_id), encode(beat)

    def _bookings(self) -> tuple[Source, bytes]:
        rng = self._rng
        hashes = pack_hashes(rng.getrandbits(64) for _ in range(rng.choice((0, 4, 400))))
        number, worker_id = rng.choice(_SEQS), self._worker_id()
        op: Op = rng.choice((
            AddRequest(number, "r", worker_id, 0, hashes, 64, 0, 64),
            Free(number),
            Check(rng.choice(_SEQS), rng.getrandbits(64)),
            Bind("session", worker_id, 0, 1000),
            SentText(worker_id, 0, "text" * 100),
            ApproxEntry(worker_id, 0, hashes, 1000),
        ))  # fmt: skip
        frame = Frame(VERSION, rng.choice(_INCARNATIONS), rng.choice(_SEQS), [op])
        return SyncSource(self._pool(), RouterId(self._name("peer"))), encode_frame(frame)

    def _blocks(self) -> tuple[Source, bytes]:
        rng = self._rng
        op = Stored(0, None, pack_hashes(rng.getrandbits(64) for _ in range(8)))
        frame = Frame(VERSION, rng.choice(_INCARNATIONS), rng.choice(_SEQS), [op])
        return KvSource(self._pool(), WorkerId(self._name("ghost")), 0), encode_frame(frame)
