"""What the processes of a namespace publish, from one subscription. Pure: messages and times come in.

    heartbeat of a worker ──> Worker: card, state, load, how regular it is, who publishes it
    heartbeat of a replica ─> Peer
    frames ────────────────> Feed: their order, what is missing, how many blocks they store

NATS keeps the order within one subscription, so a heartbeat that counts more frames than have arrived before
it proves a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.bus import Subjects
from kvrouter.core.wire.heartbeats import (
    Card,
    RankBeat,
    RouterBeat,
    WorkerBeat,
    decode_router_beat,
    decode_worker_beat,
)
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION, Stored, decode_frame
from kvrouter.core.wire.senders import Feed as FeedSource
from kvrouter.core.wire.senders import KvSource, RouterSource, SyncSource, WorkerSource
from kvrouter.errors import MalformedFrameError

# Any client of NATS may invent senders.
MOST_SENDERS = 20_000
MOST_TEXTS = 100
_BYTES_A_HASH = 8


@dataclass(slots=True)
class Feed:
    """The frames of one feed since listening began. `seq`: the newest one that is known to be sent."""

    incarnation: int = 0
    seq: int = 0
    frames: int = 0
    missing: int = 0
    repeated: int = 0
    unsent: int = 0
    """Heartbeats that count fewer frames than have arrived."""
    malformed: str = ""
    stored_blocks: int = 0


@dataclass(slots=True)
class Sender:
    """How regular the heartbeats of one process are, and whether they are those of one process."""

    beats: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    longest_gap_s: float = 0.0
    interval_s: float = 1.0
    incarnation: int = 0
    turned_back: int = 0
    """Heartbeats of an older incarnation: two processes have the name."""

    def beat(self, incarnation: int, interval_ms: int | None, now: float) -> None:
        if self.beats:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        else:
            self.first_at = now
        self.beats += 1
        self.last_at = now
        self.interval_s = (interval_ms or 1000) / 1000
        self.turned_back += incarnation < self.incarnation
        self.incarnation = max(self.incarnation, incarnation)

    def gap_s(self, now: float) -> float:
        """The longest time without a heartbeat, up to now."""
        return max(self.longest_gap_s, now - self.last_at)


@dataclass(slots=True)
class HeardWorker:
    """A worker, from its heartbeats."""

    beat: WorkerBeat
    sender: Sender = field(default_factory=Sender)
    card: Card | None = None
    least_running: dict[int, int] = field(default_factory=dict)
    """By rank, of all heartbeats with a report."""


@dataclass(slots=True)
class Peer:
    """A replica, from its heartbeats."""

    beat: RouterBeat
    sender: Sender = field(default_factory=Sender)


class Listener:
    """Everything heard in a namespace so far."""

    def __init__(self, subjects: Subjects) -> None:
        self.workers: dict[WorkerId, HeardWorker] = {}
        self.peers: dict[RouterId, Peer] = {}
        self.feeds: dict[FeedSource, Feed] = {}
        self.left: set[str] = set()
        """Workers and replicas that published `leave`."""
        self.unreadable: dict[str, str] = {}
        """Subject -> why its first unreadable message could not be read."""
        self.messages = 0
        self._subjects = subjects

    @property
    def senders(self) -> set[str]:
        return {*self.workers, *self.peers}

    def cards(self) -> dict[WorkerId, Card]:
        return {worker_id: one.card for worker_id, one in self.workers.items() if one.card is not None}

    def receive(self, subject: str, data: bytes, now: float) -> None:
        """Take one message of `live.>`."""
        self.messages += 1
        try:
            match self._subjects.parse_live(subject):
                case WorkerSource(worker_id):
                    self._worker(worker_id, decode_worker_beat(data, worker_id), now)
                case RouterSource(router_id):
                    self._peer(router_id, decode_router_beat(data), now)
                case KvSource() | SyncSource() as source:
                    self._frame(source, data)
                case None:
                    self._note(subject, "an unknown subject")
        except MalformedFrameError as error:
            self._note(subject, str(error))

    def _note(self, subject: str, why: str) -> None:
        if len(self.unreadable) < MOST_TEXTS:
            self.unreadable.setdefault(subject, why)

    def _worker(self, worker_id: WorkerId, beat: WorkerBeat, now: float) -> None:
        if beat.state == "leave":
            self.left.add(worker_id)
            self.workers.pop(worker_id, None)
            return
        if worker_id not in self.workers and len(self.workers) >= MOST_SENDERS:
            return
        one = self.workers.setdefault(worker_id, HeardWorker(beat))
        self.left.discard(worker_id)
        one.beat, one.card = beat, beat.card or one.card  # most heartbeats have no card
        one.sender.beat(beat.incarnation, beat.interval_ms, now)
        for rank in beat.ranks:
            self._count(beat, worker_id, rank)
            if rank.running is not None:
                one.least_running[rank.rank] = min(
                    rank.running, one.least_running.get(rank.rank, rank.running)
                )

    def _count(self, beat: WorkerBeat, worker_id: WorkerId, rank: RankBeat) -> None:
        """Compare a rank's frame number in a heartbeat with the frames before it."""
        feed = self._feed(KvSource(PoolId(beat.pool), worker_id, rank.rank))
        if rank.incarnation > feed.incarnation or not feed.incarnation:
            feed.incarnation, feed.seq = rank.incarnation, rank.seq  # earlier ones are not missing
        elif rank.incarnation == feed.incarnation:
            feed.unsent += rank.seq < feed.seq
            feed.missing += max(0, rank.seq - feed.seq)
            feed.seq = max(feed.seq, rank.seq)

    def _peer(self, router_id: RouterId, beat: RouterBeat, now: float) -> None:
        if beat.state == "leave":
            self.left.add(router_id)
            self.peers.pop(router_id, None)
            return
        if router_id in self.peers or len(self.peers) < MOST_SENDERS:
            one = self.peers.setdefault(router_id, Peer(beat))
            one.beat = beat
            one.sender.beat(beat.incarnation, beat.interval_ms, now)

    def _feed(self, source: FeedSource) -> Feed:
        if source in self.feeds or len(self.feeds) < 4 * MOST_SENDERS:
            return self.feeds.setdefault(source, Feed())
        return Feed()  # not kept: any client may invent feeds

    def _frame(self, source: FeedSource, data: bytes) -> None:
        feed = self._feed(source)
        try:
            frame = decode_frame(data)
        except MalformedFrameError as error:
            feed.malformed = feed.malformed or str(error)
            return
        if frame.version != VERSION or frame.ops is None:
            feed.malformed = feed.malformed or f"version {frame.version}, this is {VERSION}"
            return
        feed.frames += 1
        if frame.incarnation > feed.incarnation:
            feed.incarnation, feed.seq = frame.incarnation, frame.seq
        elif frame.incarnation < feed.incarnation or frame.seq <= feed.seq:
            feed.repeated += 1
            return
        else:
            feed.missing += frame.seq - feed.seq - 1
            feed.seq = frame.seq
        feed.stored_blocks += sum(
            len(op.hashes) // _BYTES_A_HASH for op in frame.ops if isinstance(op, Stored)
        )
