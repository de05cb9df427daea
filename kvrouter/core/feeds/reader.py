"""The reader's side of a feed: applies frames in order, notices what is missing, has it repaired.

                 frame in order: apply
                    ┌──────┐
    waiting ──────> live ──┴──> recovering ──> live
       │  heartbeat   gap, lost tail,    ^  │
       └──────────────new incarnation────┘  └─ two bad answers ──> broken ──30 s──> recovering

While recovering, live frames are held. `due` says what to ask of the source; `answer` takes
frames of its ring or chunks of a snapshot; `work` loads a snapshot in slices into a fresh place,
and the sink switches to it in one step. A broken source counts for nothing: what was held of it is
dropped, because it can no longer be kept up to date. Time is passed in; nothing here waits.

One odd number (a seq far ahead, another version) is believed until the source's next heartbeat or
answer says otherwise; another incarnation, until its lease has ended. What an answer brought is
provisional: a heartbeat that arrived later and counts less disproves it, and the second such
heartbeat in a row asks for a snapshot.

Invariants: everything up to `seq` of `incarnation` is applied, nothing after it; held frames are
newer than what was applied when they came.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.core.feeds.buffers import HeldBudget, HeldFrames, Loading, cost
from kvrouter.core.feeds.sinks import FeedSink
from kvrouter.core.feeds.trust import (
    BAD_ANSWERS,
    BROKEN_RETRY_S,
    QUESTIONS_A_SECOND,
    Backoff,
    FeedCounters,
    FeedState,
    PerSecond,
    Trust,
)
from kvrouter.core.wire.ops import (
    VERSION,
    Check,
    Decoded,
    PartialChunk,
    ReplayFrames,
    ReplayRequest,
    SnapshotChunk,
    decode_answer,
    decode_frame,
)
from kvrouter.errors import MalformedFrameError

_FOLLOWED = (FeedState.LIVE, FeedState.RECOVERING)


class FeedReader:
    """One source's feed as this replica sees it. `chance` returns a number in [0, 1), for jitter.

    `budget` bounds what all feeds of a replica hold.
    """

    def __init__(
        self,
        part: int | str,
        sink: FeedSink,
        chance: Callable[[], float],
        budget: HeldBudget | None = None,
    ) -> None:
        self.state = FeedState.WAITING
        self.incarnation = 0
        self.seq = 0
        self.source_seq = 0
        """The seq the source has sent, as it said last; `source_seq - seq` is the lag."""
        self.heard_at: float | None = None
        """When the source was last heard on this feed; None before its first word."""
        self.flag = ""
        """What is wrong with the source, for a person."""
        self.counters = FeedCounters()
        self._part = part
        self._sink = sink
        self._held = HeldFrames(budget or HeldBudget())
        self._live_seq = 0
        """The newest seq in the live traffic since the last question."""
        self._answered_at = 0.0
        """When an answer was applied last: only heartbeats that arrived later can disprove it."""
        self._want_snapshot, self._wanted_incarnation = False, 0
        self._loading: Loading | None = None
        self._asked: ReplayRequest | None = None
        self._questions = self._bad_answers = 0
        self._backoff = Backoff(chance)
        self._rate = PerSecond(QUESTIONS_A_SECOND)
        self._trust = Trust()
        self._recovering_since: float | None = None
        self._malformed_seq = 0

    @property
    def lag(self) -> int:
        """Frames the source has sent that are not applied here."""
        return max(0, self.source_seq - self.seq)

    @property
    def is_loading(self) -> bool:
        """Whether `work` has something to do."""
        return self._loading is not None and self._loading.has_work

    @property
    def is_at_rest(self) -> bool:
        """Whether there is nothing to ask and nothing to load until the source is heard again."""
        return self.state is FeedState.WAITING or (self.state is FeedState.LIVE and not self._trust.is_lost)

    @property
    def _newest(self) -> int:
        """The greatest incarnation met."""
        return max(self.incarnation, self._wanted_incarnation)

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked is not None

    # What arrives

    def frame(self, data: bytes, now: float) -> bool:
        """A live frame; False if it is not of the life that is followed.

        Never raises: whatever is wrong with it is counted and repaired.
        """
        try:
            decoded = decode_frame(data)
        except MalformedFrameError:
            self.counters.malformed += 1
            return False  # its number is lost too: the next frame or heartbeat shows the gap
        if decoded.version != VERSION:
            self._meet_other_version(decoded.version, now)
            return False
        return self._see(decoded, len(data), now)

    def heartbeat(self, incarnation: int, seq: int, now: float) -> bool:
        """The source says how far it is; False if a greater incarnation of it has been met.

        Its frames travel on the same subscription, before this. `now` is when the heartbeat arrived, which
        may be some time ago where much waits to be applied.
        """
        if incarnation < self._newest:
            return False
        if incarnation > self._newest:
            self._meet(incarnation, seq, now)
        self.heard_at = now
        self.source_seq = seq
        self._live_seq = max(self._live_seq, seq)
        self.counters.unsent += self._held.drop_unsent(seq, self._questions + 1)
        if incarnation == self.incarnation and self.state in _FOLLOWED:
            self._compare_seq(seq, now)
        return True

    def _compare_seq(self, seq: int, now: float) -> None:
        is_low = seq < self.seq and now > self._answered_at
        if self._trust.is_broken_by(is_low):
            self.counters.unsent += 1
            self._doubt("more was applied than it says it has sent", now)
        elif self.state is FeedState.LIVE and seq > self.seq:
            self.counters.gaps += 1
            self._recover(now)

    def answer(self, data: bytes, now: float) -> None:
        """What the source answered to the request that `due` returned."""
        asked, self._asked = self._asked, None
        if self.state is not FeedState.RECOVERING:
            return
        try:
            answer = decode_answer(data)
        except MalformedFrameError:
            self._meet_bad_answer("sent a malformed answer", now)
            return
        if isinstance(answer, SnapshotChunk):
            self._take_chunk(answer, now)
        elif asked is not None and not asked.from_seq:
            self._meet_bad_answer("sent frames where a snapshot was asked for", now)
        else:
            self._replay(answer, now)

    def _meet_bad_answer(self, reason: str, now: float) -> None:
        """Ask again after a pause: the first may be damage, or forged. The second breaks the source."""
        self.counters.malformed += 1
        self._bad_answers += 1
        if self._bad_answers < BAD_ANSWERS:
            self._backoff.begin(now)
        else:
            self._break(reason, now)

    def failed(self, now: float) -> None:
        """The request got no answer."""
        self._asked = None
        self.counters.failures += 1
        self._backoff.begin(now)

    def break_down(self, now: float) -> None:
        """A step on what the source sent has raised: this feed alone stops, and restarts after a pause."""
        self.counters.errors += 1
        self._break("an internal error met what it sent (see the log)", now)

    def close(self) -> None:
        """The source is gone: what was half loaded takes no room any longer."""
        self._held.clear()
        self._give_up_load()

    def due(self, now: float) -> ReplayRequest | None:
        """The request to send now, if any. The caller reports back with `answer` or `failed`."""
        if self.state is FeedState.BROKEN and self._backoff.is_over(now):
            self._recover(now, snapshot=True)
        if self.state is FeedState.LIVE and self._trust.wants_snapshot(now):
            self._recover(now, snapshot=True)
        is_waiting = self.is_asking or self.is_loading or not self._backoff.is_over(now)
        if self.state is not FeedState.RECOVERING or is_waiting:
            return None
        if self._loading is None and not self._rate.allows(now):
            return None
        self._questions += 1
        self._live_seq = 0
        self._asked = self._question()
        return self._asked

    def _question(self) -> ReplayRequest:
        loading = self._loading
        if loading is not None:
            return ReplayRequest(VERSION, self._part, self._newest, 0, loading.id, loading.next_chunk)
        return ReplayRequest(VERSION, self._part, self._newest, 0 if self._want_snapshot else self.seq + 1)

    def work(self, hashes: int, now: float) -> None:
        """Load about this many hashes of a snapshot, or what costs as much."""
        loading = self._loading
        if loading is None:
            return
        while loading.ops and hashes > 0:
            op = loading.ops.popleft()
            hashes -= cost(op)
            if trouble := self._sink.load(op, now):
                self.counters.contradictions += 1
                self._give_up_load()
                self._meet_bad_answer(f"sent a snapshot that contradicts itself: {trouble}", now)
                return
        if not loading.ops and loading.is_complete:
            self._finish_load(loading, now)

    # Frames

    def _see(self, decoded: Decoded, size: int, now: float) -> bool:
        self.heard_at = now
        self.counters.unknown_ops += decoded.unknown_ops
        if decoded.incarnation < self._newest:
            self.counters.stale += 1
            return False
        if decoded.incarnation > self._newest:
            self._meet(decoded.incarnation, decoded.seq - 1, now)
        self.source_seq = max(self.source_seq, decoded.seq)
        self._live_seq = max(self._live_seq, decoded.seq)
        if self.state is FeedState.BROKEN:
            return True  # the snapshot to come has it
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
        return True

    def _meet(self, incarnation: int, seq: int, now: float) -> None:
        """A greater incarnation: the source started anew. If it has sent nothing yet, so do we."""
        self.close()
        self.source_seq = self._live_seq = seq
        self._malformed_seq = self._bad_answers = 0
        self._trust = Trust()
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
            elif trouble := self._sink.apply(op, now):
                self.counters.contradictions += 1
                self._doubt(f"contradicts itself: {trouble}", now)
            if self.state is not FeedState.LIVE and self._want_snapshot:
                return
        self.seq = decoded.seq
        self._backoff.reset()
        self.counters.applied += 1

    def _meet_malformed(self, seq: int, now: float) -> None:
        """Ask for the frame again; if it comes malformed a second time, for a snapshot."""
        self.counters.malformed += 1
        second = self._malformed_seq == seq
        self._malformed_seq = seq
        self._recover(now, snapshot=second)

    def _meet_other_version(self, version: int, now: float) -> None:
        """Flagged; a source that does speak this version says so by its answer, and the flag goes."""
        self.counters.other_versions += 1
        self.flag = f"speaks version {version}, this replica {VERSION}"
        if self.state is FeedState.LIVE:
            self._recover(now)

    def _compare(self, check: Check, now: float) -> None:
        if self._sink.agrees(check):
            self._trust.confirm()
            self.flag = ""
            if self._trust.may_fill_up(now) and self._sink.has_room_again():
                self._recover(now, snapshot=True)
            return
        self.counters.digest_mismatches += 1
        self._doubt("its digest keeps differing from what is held here", now)

    def _doubt(self, reason: str, now: float) -> None:
        """What is held here is not what the source has."""
        may_ask = self._trust.doubt(now)
        if self._trust.is_lost:
            self.flag = reason
        if may_ask:  # else go on with what there is: a snapshot did not help a moment ago
            self._recover(now, snapshot=True)

    def _hold(self, decoded: Decoded, size: int, now: float) -> None:
        if not self._held.hold(decoded, size, self._questions):
            self.counters.held_overflows += 1
            self._held.clear()
            self._give_up_load()
            self._recover(now)
            self._backoff.begin(now)

    # Recovery

    def _recover(self, now: float, *, snapshot: bool = False) -> None:
        if self._recovering_since is None:
            self._recovering_since = now
        self.state = FeedState.RECOVERING
        self._want_snapshot = self._want_snapshot or snapshot
        self._backoff.end(now)

    def _replay(self, answer: ReplayFrames, now: float) -> None:
        if self._want_snapshot:
            return  # meanwhile frames are not enough
        before = self.seq
        self._bad_answers = 0
        self._answered_at = now
        self.state = FeedState.LIVE
        for data in answer.frames:
            self._replay_frame(data, now)
        self.counters.replayed += self.seq - before
        if answer.seq is not None:
            self._learn_end(answer.seq)
        self._catch_up(now)
        if self.state is FeedState.RECOVERING and self.seq == before:
            self._backoff.begin(now)

    def _learn_end(self, seq: int) -> None:
        """The source had sent `seq` frames when it answered; what counts more and came before is damage."""
        self.counters.unsent += self._held.drop_unsent(seq, self._questions)
        self.source_seq = max(seq, self._live_seq)

    def _replay_frame(self, data: bytes, now: float) -> None:
        try:
            decoded = decode_frame(data)
        except MalformedFrameError:
            self._meet_malformed(self.seq + 1, now)
            return
        if decoded.version != VERSION:
            self._meet_other_version(decoded.version, now)
            return
        follows = decoded.incarnation == self.incarnation and decoded.seq == self.seq + 1
        if follows and self.state is FeedState.LIVE:
            self._apply(decoded, now)

    def _catch_up(self, now: float) -> None:
        """Go on with what was held; if that does not reach what the source has sent, ask for the rest."""
        self._drain_held(now)
        if self.state is FeedState.LIVE and self.seq < self.source_seq:
            self._recover(now)
        if self.state is not FeedState.LIVE:
            return
        if not self._trust.is_lost:
            self.flag = ""
        if self._recovering_since is not None:
            self.counters.recovery_s = now - self._recovering_since
            self._recovering_since = None

    def _drain_held(self, now: float) -> None:
        """Apply held frames that follow on; what lies behind a further gap stays held."""
        while self._held and self.state is FeedState.LIVE:
            decoded = self._held.first
            if decoded.incarnation == self.incarnation and decoded.seq > self.seq + 1:
                self._recover(now)
                return
            self._held.pop()
            if decoded.incarnation == self.incarnation and decoded.seq == self.seq + 1:
                self._apply(decoded, now)

    def _take_chunk(self, chunk: SnapshotChunk, now: float) -> None:
        if chunk.incarnation < self._newest:
            self._backoff.begin(now)
            return
        loading = self._loading
        if loading is None or not loading.is_next(chunk):
            if chunk.chunk != 0:
                self._give_up_load()  # its snapshot is gone: the next request begins anew
                self._backoff.begin(now)
                return
            self._sink.begin_load()
            loading = self._loading = Loading.begin(chunk)
        if isinstance(chunk, PartialChunk):
            self.counters.unknown_ops += chunk.unknown_ops
        loading.take(chunk)

    def _finish_load(self, loading: Loading, now: float) -> None:
        self._loading = None
        self._bad_answers = 0
        self._sink.finish_load()
        if loading.incarnation > self._newest:
            self.source_seq = 0  # it started again meanwhile: the old numbers are void
        self.incarnation = self._wanted_incarnation = loading.incarnation
        self.seq = loading.as_of_seq
        self._answered_at = now
        self.source_seq = max(self.source_seq, self.seq)
        self.counters.snapshots += 1
        self._trust.renew()
        self._want_snapshot = False
        self.state = FeedState.LIVE
        self._catch_up(now)
        if self._want_snapshot:
            self._backoff.begin(now)  # the snapshot did not lead on: a frame behind it may be poisoned

    def _give_up_load(self) -> None:
        if self._loading is not None:
            self._loading = None
            self._sink.abandon_load()

    def _break(self, reason: str, now: float) -> None:
        self.flag = reason
        self.state = FeedState.BROKEN
        self._bad_answers = 0
        self._backoff.wait(BROKEN_RETRY_S, now)
        self._held.clear()
        self._give_up_load()
        self._sink.reset()
