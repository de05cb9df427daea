"""A KV feed from end to end in memory: an owner, its source, a link that may lose, a reader, an index."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.sinks import KvSink
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import (
    TIERS,
    VERSION,
    Check,
    Cleared,
    Frame,
    Op,
    Removed,
    ReplayRequest,
    Stored,
    decode_request,
    encode,
)
from tests.core.forest import Forest, NaiveIndex

TARGET = Target(WorkerId("w1"))
MAX_BYTES = 1024 * 1024


class Room(NamedTuple):
    """A worker whose card has room for these blocks."""

    capacity_blocks: int


class Owner:
    """An agent's published sets, and the ops that describe their changes."""

    def __init__(self, forest: Forest, tier_sets: int = 1) -> None:
        self.forest = forest
        self.published = NaiveIndex()
        self._tier_sets = tier_sets
        self.lose()

    def lose(self) -> None:
        """Empty all sets."""
        self.published.sets[TARGET] = [set() for _ in range(self._tier_sets)]

    @property
    def sets(self) -> list[set[int]]:
        """Tier sets, narrowest first."""
        return self.published.sets[TARGET]

    def store(self, node: int, tier: int = 0) -> list[Op]:
        """A chain is computed: ops for its missing blocks, parent first."""
        chain = self.forest.chain(node)
        held = sum(hash_ in self.sets[tier] for hash_ in chain)  # a prefix: the set is closed
        self.published.store(TARGET, chain, TIERS[tier])
        parent = chain[held - 1] if held else None
        return [Stored(tier, parent, pack_hashes(chain[held:]))] if held < len(chain) else []

    def remove(self, node: int, tier: int = 0) -> list[Op]:
        """A block is evicted with all below it, deepest first."""
        held = [hash_ for hash_ in self.forest.subtree(node) if hash_ in self.sets[tier]]
        self.published.remove(TARGET, held, TIERS[tier])
        return [Removed(tier, pack_hashes(held))] if held else []

    def clear(self) -> list[Op]:
        """The engine restarts."""
        self.published.clear(TARGET)
        return [Cleared()]

    def check(self) -> list[Op]:
        """A Check of each tier set."""
        return [
            Check(*self.published.digest(TARGET, TIERS[tier]), tier=tier) for tier in range(self._tier_sets)
        ]

    def state_ops(self) -> Iterator[Op]:
        """One Stored per block, narrowest tier first, parents before children."""
        listed: set[int] = set()
        for tier, held in enumerate(self.sets):
            for number, hash_ in enumerate(self.forest.hashes):
                if hash_ in held and hash_ not in listed:
                    parent = self.forest.parents[number]
                    above = None if parent is None else self.forest.hashes[parent]
                    yield Stored(tier, above, pack_hashes([hash_]))
            listed |= held


class Link:
    """Carries frames, heartbeats and requests; the test decides what is lost. Time is `now`."""

    def __init__(
        self,
        seed: int = 1,
        size: int = 48,
        *,
        tier_sets: int = 1,
        capacity: int = 0,
        ring_frames: int = 4096,
        index: BlockIndex | None = None,
        target: Target = TARGET,
    ) -> None:
        self.owner = Owner(Forest(seed, size), tier_sets)
        self.index = BlockIndex() if index is None else index
        self.target = target
        self.ring_frames = ring_frames
        self.max_bytes = MAX_BYTES
        self.now = 100.0
        self.requests: list[ReplayRequest] = []
        self.sink = KvSink(self.index, target, tier_sets, {target.worker_id: Room(capacity)})
        self.reader = FeedReader(0, self.sink, lambda: 0.5)
        self.source = self.new_source(1000)

    def new_source(self, incarnation: int) -> FeedSource:
        """The owner starts, or restarts."""
        self.source = FeedSource(
            incarnation, lambda _now: self.owner.state_ops(), ring_frames=self.ring_frames
        )
        return self.source

    @property
    def ring(self) -> deque[bytes]:
        """The frames that the owner keeps, to lose or damage some."""
        return self.source._ring

    def write(self, *ops: Op) -> bytes:
        """One frame of the feed, not delivered."""
        (frame,) = self.source.append(ops)
        return frame

    def deliver(self, *frames: bytes) -> None:
        for frame in frames:
            self.reader.frame(frame, self.now)

    def send(self, ops: Sequence[Op]) -> None:
        """A frame is written and arrives."""
        self.deliver(*self.source.append(ops))

    def heartbeat(self) -> None:
        self.reader.heartbeat(self.source.incarnation, self.source.seq, self.now)

    def ask(self) -> bytes | None:
        """The answer to the reader's next question, not delivered yet. None: the reader asks nothing."""
        request = self.reader.due(self.now)
        if request is None:
            return None
        self.requests.append(request)
        return self.source.answer(decode_request(encode(request)), self.max_bytes, self.now)

    def exchange(self) -> bool:
        """One request and its answer, or one slice of loading; False if there is nothing to do."""
        if self.reader.is_loading:
            self.reader.work(7, self.now)
            return True
        answer = self.ask()
        if answer is not None:
            self.reader.answer(answer, self.now)
        return answer is not None

    def exchange_all(self, most: int = 200) -> int:
        """Exchange until the reader asks nothing at this moment; returns the number of requests."""
        before = len(self.requests)
        for _ in range(most):
            if not self.exchange():
                return len(self.requests) - before
        raise AssertionError(f"the reader still asks after {most} exchanges")

    def settle(self, seconds: float = 40.0) -> None:
        """Deliver a heartbeat a second on a clean link until the reader is live, for at most `seconds`."""
        until = self.now + seconds
        self.heartbeat()
        while self.exchange_all() or self.reader.state is not FeedState.LIVE:
            assert self.now < until, f"not live after {seconds} s: {self.reader.state} {self.reader.flag}"
            self.now += 1.0
            self.heartbeat()

    def held(self) -> list[set[int]]:
        """The blocks of the target in the index, tier by tier."""
        return [
            {hash_ for hash_ in self.owner.forest.hashes if self.index.holds(self.target, hash_, tier)}
            for tier in TIERS[: len(self.owner.sets)]
        ]

    def agrees(self) -> bool:
        """Whether index and owner hold the same blocks, tier by tier."""
        self.index.check()
        held = self.held()
        digests = [self.index.digest(self.target, tier) for tier in TIERS[: len(self.owner.sets)]]
        return held == self.owner.sets and digests == [
            self.owner.published.digest(TARGET, tier) for tier in TIERS[: len(self.owner.sets)]
        ]


def malformed(frame: bytes) -> bytes:
    """The frame with its number and damaged ops."""
    (version, incarnation, seq, _) = _unpack(frame)
    return encode([version, incarnation, seq, [[1, "damaged"]]])


def _unpack(frame: bytes) -> tuple[int, int, int, object]:
    from kvrouter.core.wire.ops import decode_frame

    decoded = decode_frame(frame)
    return decoded.version, decoded.incarnation, decoded.seq, decoded.ops


def frame_of(incarnation: int, seq: int, *ops: Op, version: int = VERSION) -> bytes:
    """A frame that no source wrote."""
    return encode(Frame(version, incarnation, seq, list(ops)))
