"""The reader's side of a feed: applies frames in order, notices what is missing, has it repaired.

                 frame in order: apply
                    ┌──────┐
    waiting ──────> live ──┴──> recovering ──> live
       │  heartbeat   gap, lost tail,    ^  │
       └──────────────new incarnation────┘  └─ malformed snapshot ──> broken ──30 s──> recovering

While recovering, live frames are held. `due` says what to ask of the source; `answer` takes
frames of its ring or chunks of a snapshot; `work` loads a snapshot in slices into a fresh place,
and the sink switches to it in one step. Time is passed in; nothing here waits.

Invariants: everything up to `seq` of `incarnation` is applied, nothing after it; held frames are
in order of arrival and all newer than what was applied when they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrouter.core.events import (
    VERSION,
    AddRequest,
    ApproxEntry,
    Check,
    Decoded,
    Op,
    Removed,
    ReplayFrames,
    ReplayRequest,
    SnapshotChunk,
    Stored,
    decode_answer,
    decode_frame,
)
from kvrouter.core.feed_state import FeedCounters, FeedState
from kvrouter.core.sinks import FeedSink
from kvrouter.errors import MalformedFrameError

HELD_BYTES = 32 * 1024 * 1024
BROKEN_RETRY_S = 30.0
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0


class FeedReader:
    """One source's feed as this replica sees it. `chance` returns a number in [0, 1), for jitter."""

    def __init__(self, part: int | str, sink: FeedSink, chance: Callable[[], float]) -> None:
        self.state = FeedState.WAITING
        self.incarnation = 0
        self.seq = 0
        self.source_seq = 0
        """The newest seq the source is known to have sent; `source_seq - seq` is the lag."""
        self.heard_at: float | None = None
        """When the source was last heard on this feed; None before its first word."""
        self.flag = ""
        """What is wrong with the source, for a person; empty if nothing."""
        self.counters = FeedCounters()
        self._part = part
        self._sink = sink
        self._chance = chance
        self._held: deque[Decoded] = deque()
        self._held_bytes = 0
        self._want_snapshot = False
        self._wanted_incarnation = 0
        self._snapshot_not_before = 0.0
        self._loading: _Loading | None = None
        self._asked = False
        self._attempts = 0
        self._retry_at = 0.0
        self._recovering_since: float | None = None
        self._malformed_seq = 0
        self._mismatches_in_row = 0

    @property
    def lag(self) -> int:
        """Frames the source has sent that are not applied here."""
        return max(0, self.source_seq - self.seq)

    @property
    def is_loading(self) -> bool:
        """Whether `work` has something to do."""
        loading = self._loading
        return loading is not None and (bool(loading.ops) or loading.next_chunk == loading.chunks)

    # What arrives

    def frame(self, data: bytes, now: float) -> None:
        """A live frame. Never raises: whatever is wrong with it is counted and repaired."""
        try:
            decoded = decode_frame(data)
        except MalformedFrameError:
            self.counters.malformed += 1
            return  # its number is lost too: the next frame or heartbeat shows the gap
        if decoded.version != VERSION:
            self.flag = f"speaks version {decoded.version}, this replica {VERSION}"
            return
        self._see(decoded, len(data), now)

    def heartbeat(self, incarnation: int, seq: int, now: float) -> bool:
        """The source says how far it is; False if a greater incarnation of it has been met.

        Its frames travel on the same subscription, before this.
        """
        if incarnation < max(self.incarnation, self._wanted_incarnation):
            return False
        if incarnation > max(self.incarnation, self._wanted_incarnation):
            self._meet(incarnation, seq, now)
        self.heard_at = now
        self.source_seq = max(self.source_seq, seq)
        if self.state is FeedState.LIVE and seq > self.seq:
            self.counters.gaps += 1
            self._recover(now)
        return True

    def answer(self, data: bytes, now: float) -> None:
        """What the source answered to the request that `due` returned."""
        self._asked = False
        if self.state is not FeedState.RECOVERING:
            return
        try:
            answer = decode_answer(data)
        except MalformedFrameError:
            self._break("sent a malformed snapshot", now)
            return
        if isinstance(answer, ReplayFrames):
            self._replay(answer, now)
        else:
            self._take_chunk(answer, now)

    def failed(self, now: float) -> None:
        """The request got no answer."""
        self._asked = False
        self.counters.failures += 1
        self._back_off(now)

    def close(self) -> None:
        """The source is gone: what was half loaded takes no room any longer."""
        self._drop_held()
        self._give_up_load()

    # What to do

    def due(self, now: float) -> ReplayRequest | None:
        """The request to send now, if any. The caller reports back with `answer` or `failed`."""
        if self.state is FeedState.BROKEN and now >= self._retry_at:
            self._recover(now, snapshot=True)
        if self.state is not FeedState.RECOVERING or self._asked or now < self._retry_at or self.is_loading:
            return None
        loading = self._loading
        self._asked = True
        incarnation = max(self.incarnation, self._wanted_incarnation)
        if loading is not None:
            return ReplayRequest(VERSION, self._part, incarnation, 0, loading.id, loading.next_chunk)
        return ReplayRequest(VERSION, self._part, incarnation, 0 if self._want_snapshot else self.seq + 1)

    def work(self, hashes: int, now: float) -> None:
        """Load about this many hashes of a snapshot."""
        loading = self._loading
        if loading is None:
            return
        while loading.ops and hashes > 0:
            op = loading.ops.popleft()
            hashes -= _weight(op)
            if not self._sink.load(op, now):
                self.counters.contradictions += 1
                self._break("sent a snapshot that contradicts itself", now)
                return
        if not loading.ops and loading.next_chunk == loading.chunks:
            self._finish_load(loading, now)

    # Frames

    def _see(self, decoded: Decoded, size: int, now: float) -> None:
        self.heard_at = now
        self.counters.unknown_ops += decoded.unknown_ops
        if decoded.incarnation < max(self.incarnation, self._wanted_incarnation):
            self.counters.stale += 1
            return
        if decoded.incarnation > max(self.incarnation, self._wanted_incarnation):
            self._meet(decoded.incarnation, decoded.seq - 1, now)
        self.source_seq = max(self.source_seq, decoded.seq)
        if self.state is not FeedState.LIVE:
            self._hold(decoded, size, now)
        elif decoded.seq <= self.seq:
            self.counters.repeated += 1
        elif decoded.seq > self.seq + 1:
            self.counters.gaps += 1
            self._hold(decoded, size, now)
            self._recover(now)
        else:
            self._apply(decoded, now)

    def _meet(self, incarnation: int, seq: int, now: float) -> None:
        """A greater incarnation: the source started anew. If it has sent nothing yet, so do we."""
        self._drop_held()
        self._give_up_load()
        self.source_seq = seq
        self._malformed_seq = self._mismatches_in_row = 0
        self._snapshot_not_before = 0.0
        if seq > 0:
            self._wanted_incarnation = incarnation
            self._recover(now, snapshot=True)
            return
        self._sink.reset()
        self.incarnation = self._wanted_incarnation = incarnation
        self.seq = 0
        self._want_snapshot = False
        self.state = FeedState.LIVE
        self._catch_up(now)

    def _apply(self, decoded: Decoded, now: float) -> None:
        if decoded.ops is None:
            self._meet_malformed(decoded.seq, now)
            return
        for op in decoded.ops:
            if isinstance(op, Check):
                self._compare(op, now)
            elif not self._sink.apply(op, now):
                self.counters.contradictions += 1
                self._recover(now, snapshot=True)
            if self.state is not FeedState.LIVE and self._want_snapshot:
                return
        self.seq = decoded.seq
        self._attempts = 0
        self.counters.applied += 1

    def _meet_malformed(self, seq: int, now: float) -> None:
        """Ask for the frame again; if it comes malformed a second time, for a snapshot."""
        self.counters.malformed += 1
        second = self._malformed_seq == seq
        self._malformed_seq = seq
        self._recover(now, snapshot=second)

    def _compare(self, check: Check, now: float) -> None:
        if self._sink.agrees(check):
            self._mismatches_in_row = 0
            self.flag = ""
            return
        self.counters.digest_mismatches += 1
        self._mismatches_in_row += 1
        if self._mismatches_in_row > 1:
            self.flag = "its digest keeps differing from what is held here"
            if now < self._snapshot_not_before:
                return  # go on with what there is: a snapshot did not help a moment ago
        self._snapshot_not_before = now + BROKEN_RETRY_S
        self._recover(now, snapshot=True)

    def _hold(self, decoded: Decoded, size: int, now: float) -> None:
        self._held.append(decoded)
        self._held_bytes += size
        if self._held_bytes > HELD_BYTES:
            self.counters.held_overflows += 1
            self._drop_held()
            self._give_up_load()
            self._recover(now)

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    # Recovery

    def _recover(self, now: float, *, snapshot: bool = False) -> None:
        if self._recovering_since is None:
            self._recovering_since = now
        self.state = FeedState.RECOVERING
        self._want_snapshot = self._want_snapshot or snapshot
        self._retry_at = now

    def _replay(self, answer: ReplayFrames, now: float) -> None:
        if self._want_snapshot:
            return  # the answer to an older question
        before = self.seq
        self.state = FeedState.LIVE
        for data in answer.frames:
            self._replay_frame(data, now)
        self.counters.replayed += self.seq - before
        self._catch_up(now)
        if self.state is FeedState.RECOVERING and self.seq == before:
            self._back_off(now)

    def _replay_frame(self, data: bytes, now: float) -> None:
        try:
            decoded = decode_frame(data)
        except MalformedFrameError:
            self._meet_malformed(self.seq + 1, now)
            return
        follows = decoded.incarnation == self.incarnation and decoded.seq == self.seq + 1
        if follows and self.state is FeedState.LIVE:
            self._apply(decoded, now)

    def _catch_up(self, now: float) -> None:
        """Go on with what was held; if that does not reach what the source has sent, ask for the rest."""
        self._drain_held(now)
        if self.state is FeedState.LIVE and self.seq < self.source_seq:
            self._recover(now)
        if self.state is FeedState.LIVE and self._recovering_since is not None:
            self.counters.recovery_s = now - self._recovering_since
            self._recovering_since = None

    def _drain_held(self, now: float) -> None:
        """Apply held frames that follow on; what lies behind a further gap stays held."""
        while self._held and self.state is FeedState.LIVE:
            decoded = self._held[0]
            if decoded.incarnation == self.incarnation and decoded.seq > self.seq + 1:
                self._recover(now)
                return
            self._held.popleft()
            if decoded.incarnation == self.incarnation and decoded.seq == self.seq + 1:
                self._apply(decoded, now)
        if not self._held:
            self._held_bytes = 0

    def _take_chunk(self, chunk: SnapshotChunk, now: float) -> None:
        if chunk.incarnation < max(self.incarnation, self._wanted_incarnation):
            self._back_off(now)
            return
        loading = self._loading
        arrived = (chunk.incarnation, chunk.snapshot_id, chunk.chunk)
        if loading is None or arrived != (loading.incarnation, loading.id, loading.next_chunk):
            if chunk.chunk != 0:
                self._give_up_load()  # its snapshot is gone: the next request begins anew
                self._back_off(now)
                return
            self._sink.begin_load()
            loading = self._loading = _Loading(
                chunk.snapshot_id, chunk.as_of_seq, chunk.incarnation, chunk.chunks
            )
        loading.ops.extend(chunk.ops)
        loading.next_chunk += 1

    def _finish_load(self, loading: _Loading, now: float) -> None:
        self._loading = None
        self._sink.finish_load()
        if loading.incarnation > max(self.incarnation, self._wanted_incarnation):
            self.source_seq = 0  # it started anew while it was asked: the old numbers are void
        self.incarnation = self._wanted_incarnation = loading.incarnation
        self.seq = loading.as_of_seq
        self.source_seq = max(self.source_seq, self.seq)
        self.counters.snapshots += 1
        self._want_snapshot = False
        self.state = FeedState.LIVE
        self._catch_up(now)
        if self.state is FeedState.RECOVERING:
            self._back_off(now)  # the snapshot did not lead on: a frame behind it may be poisoned

    def _give_up_load(self) -> None:
        if self._loading is not None:
            self._loading = None
            self._sink.abandon_load()

    def _break(self, reason: str, now: float) -> None:
        self.counters.malformed += 1
        self.flag = reason
        self._give_up_load()
        self._drop_held()
        self.state = FeedState.BROKEN
        self._retry_at = now + BROKEN_RETRY_S

    def _back_off(self, now: float) -> None:
        delay = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(self._attempts, 10))
        self._attempts += 1
        self._retry_at = now + delay * (0.5 + self._chance())


@dataclass(slots=True)
class _Loading:
    """A snapshot on its way in."""

    id: int
    as_of_seq: int
    incarnation: int
    chunks: int
    next_chunk: int = 0
    ops: deque[Op] = field(default_factory=deque)


def _weight(op: Op) -> int:
    """How many hashes an op costs to load."""
    if isinstance(op, Stored | Removed | AddRequest | ApproxEntry):
        return 1 + len(op.hashes) // 8
    return 1
