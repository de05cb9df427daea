"""The reader's side of a feed: it applies frames in order, notices gaps and recovers.

                 frame in order: apply
                    ┌──────┐
    waiting ──────> live ──┴──> recovering ──> live
       │  heartbeat   gap, lost tail,    ^  │
       └──────────────new incarnation────┘  └─ two bad answers ──> broken ──30 s──> recovering

While recovering, live frames are held. `due` returns the question for the source; `answer` takes frames of
its ring or chunks of a snapshot; `work` loads a snapshot in slices into fresh slots, and the sink switches to
them in one step. The state of a broken source is dropped, because it can no longer be kept up to date. Time
is passed in; nothing here waits.

A state is entered in `_go_on_from` and `_replay` (live), `_recover` and `_break`. Each may follow any other,
except waiting, so there is no table of them: it would forbid nothing. What arrives decides.

One odd number (a seq far ahead, another version) counts only until the source's next heartbeat or answer;
another incarnation, until its lease has ended. What an answer brought is provisional: if two later heartbeats
in a row report fewer frames, a snapshot is asked for.

Invariants: everything up to `seq` of `incarnation` is applied, and nothing after it; held frames are newer
than what was applied when they arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvrouter.core.feeds.buffers import HeldBudget, HeldFrames, Loading, cost
from kvrouter.core.feeds.position import new_position
from kvrouter.core.feeds.receipt import OTHER_VERSION, STALE, TAKEN, FrameVerdict, Receipt, malformed
from kvrouter.core.feeds.sinks import FeedSink
from kvrouter.core.feeds.trust import (
    BAD_ANSWERS,
    BROKEN_RETRY_S,
    QUESTIONS_A_SECOND,
    Backoff,
    Doubts,
    FeedCounters,
    FeedState,
    PerSecond,
)
from kvrouter.core.wire.ops import (
    VERSION,
    Check,
    CheckResumable,
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
    """The copy of one source's feed in this replica. `part`: the rank (KV) or the pool (sync).

    `chance` returns a number in [0, 1), for jitter. `budget` bounds what all feeds of a replica hold.
    """

    def __init__(
        self,
        part: int | str,
        sink: FeedSink,
        chance: Callable[[], float],
        budget: HeldBudget | None = None,
    ) -> None:
        self.position = new_position()
        self.flag = ""  # a sentence for operators: what is wrong with the source
        self._state = FeedState.WAITING
        self._counters = FeedCounters()
        self.unanswered = 0
        """Questions in a row that got no answer."""
        self.has_answered = False
        """Whether a question was ever answered."""
        self._part = part
        self._sink = sink
        self._held = HeldFrames(budget or HeldBudget())
        # When the last answer was applied: only heartbeats that arrived later can disprove it.
        self._answered_at = 0.0
        self._want_snapshot, self._wanted_incarnation = False, 0
        self._loading: Loading | None = None
        self._asked: ReplayRequest | None = None
        self._questions = self._bad_answers = 0
        self._backoff = Backoff(chance)
        self._rate = PerSecond(QUESTIONS_A_SECOND)
        self._doubts = Doubts()
        self._recovering_since: float | None = None
        self._malformed_seq = 0

    @property
    def state(self) -> FeedState:
        return self._state

    @state.setter
    def state(self, state: FeedState) -> None:
        self._state = state
        self.position.into = None  # until a message shows that all is well

    @property
    def seq(self) -> int:
        """Everything up to this frame is applied."""
        return self.position.seq

    @property
    def incarnation(self) -> int:
        return self.position.incarnation

    @property
    def source_seq(self) -> int:
        """The last frame that the source reports to have sent."""
        return self.position.source_seq

    @property
    def received_at(self) -> float | None:
        """When the last message came; None before the first."""
        return self.position.received_at

    @property
    def counters(self) -> FeedCounters:
        """What has happened."""
        self._counters.applied += self.position.taken
        self.position.taken = 0
        return self._counters

    @property
    def lag(self) -> int:
        """Frames that the source has sent and that are not applied here."""
        return max(0, self.source_seq - self.seq)

    @property
    def is_loading(self) -> bool:
        """Whether `work` has something to do."""
        return self._loading is not None and self._loading.has_work

    @property
    def is_at_rest(self) -> bool:
        """Whether there is nothing to ask and nothing to load until the next message of the source."""
        is_quiet = self.state is FeedState.LIVE and not self._doubts.is_repeated
        return is_quiet or self.state is FeedState.WAITING

    @property
    def _newest(self) -> int:
        """The greatest incarnation received."""
        return max(self.incarnation, self._wanted_incarnation)

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked is not None

    # What arrives

    def frame(self, data: bytes, now: float) -> Receipt:
        """Take a live frame. Never raises for bad data: that is counted and leads to a recovery.

        A frame whose ops cannot be read is taken, with the trouble: its source lives, and is asked for it.
        """
        if self.position.take(data, now):
            return TAKEN
        try:
            decoded = decode_frame(data)
        except MalformedFrameError as error:
            self.counters.malformed += 1
            return malformed(error)  # its number is unknown too: the next frame or heartbeat shows the gap
        if decoded.version != VERSION:
            self._meet_other_version(decoded.version, now)
            return OTHER_VERSION
        receipt = self._see(decoded, len(data), now)
        self.look_again()
        return receipt

    def look_again(self) -> None:
        """Let frames with nothing odd in them go to the sink's slot at once, while all is well.

        After anything that arrives, and when the worker's card has changed.
        """
        is_well = self.state is FeedState.LIVE and self._backoff.is_reset and self._doubts.is_clear
        plain = self._sink.plain() if is_well and not (self.flag or self._held) else None
        self.position.into, self.position.most = plain or (None, 0)

    def heartbeat(self, incarnation: int, seq: int, now: float) -> bool:
        """The source reports how many frames it has sent; False if it is of an older incarnation.

        Frames arrive on the same subscription as the heartbeat that counts them, and before it: NATS keeps
        order only within one subscription. `now` is when the heartbeat arrived, which may be long
        ago if the inbox is long.
        """
        if self.position.is_told(incarnation, seq, now):
            return True
        if incarnation < self._newest:
            return False
        if incarnation > self._newest:
            self._meet(incarnation, seq, now)
        self.position.received_at = now
        self.position.source_seq = seq
        self.position.live_seq = max(self.position.live_seq, seq)
        # questions + 1: every held frame arrived before this heartbeat, so none can be newer
        self.counters.unsent += self._held.drop_unsent(seq, self._questions + 1)
        if incarnation == self.incarnation and self.state in _FOLLOWED:
            self._compare_seq(seq, now)
        self.look_again()
        return True

    def _compare_seq(self, seq: int, now: float) -> None:
        is_low = seq < self.seq and now > self._answered_at
        if self._doubts.is_proved_by(is_low=is_low):
            self.counters.unsent += 1
            self._doubt("it reports fewer frames than were applied here", now)
        elif self.state is FeedState.LIVE and seq > self.seq:
            self.counters.gaps += 1
            self._recover(now)

    def answer(self, data: bytes, now: float) -> Receipt:
        """Take the source's answer to the request that `due` returned."""
        asked, self._asked = self._asked, None
        self.unanswered, self.has_answered = 0, True
        if self.state is not FeedState.RECOVERING:
            return STALE
        try:
            answer = decode_answer(data)
        except MalformedFrameError as error:
            self._meet_bad_answer("sent a malformed answer", now)
            return malformed(error)
        if isinstance(answer, SnapshotChunk):
            return self._take_chunk(answer, now)
        if asked is not None and not asked.from_seq:
            reason = "sent frames where a snapshot was asked for"
            self._meet_bad_answer(reason, now)
            return Receipt(FrameVerdict.MALFORMED, reason)
        return self._replay(answer, now)

    def _meet_bad_answer(self, reason: str, now: float) -> None:
        """Ask again after a pause; the second bad answer in a row breaks the source."""
        self.counters.malformed += 1
        self._bad_answers += 1
        if self._bad_answers < BAD_ANSWERS:
            self._backoff.begin(now)
        else:
            self._break(reason, now)

    def failed(self, now: float) -> None:
        """The request got no answer."""
        self._asked = None
        self.unanswered += 1
        self.counters.failures += 1
        self._backoff.begin(now)
        self.look_again()

    def break_down(self, now: float) -> None:
        """Processing the source's data has raised: stop this feed alone, and restart it after a pause."""
        self.counters.errors += 1
        self._break("its data led to an internal error (see the log)", now)

    def close(self) -> None:
        """The source has gone: free what was held and half loaded."""
        self.position.into = None
        self._held.clear()
        self._give_up_load()

    def due(self, now: float) -> ReplayRequest | None:
        """The request to send now, if any. The caller then calls `answer` or `failed`."""
        if self.state is FeedState.BROKEN and self._backoff.is_over(now):
            self._recover(now, snapshot=True)
        if self.state is FeedState.LIVE and self._doubts.wants_snapshot(now):
            self._recover(now, snapshot=True)
        is_waiting = self.is_asking or self.is_loading or not self._backoff.is_over(now)
        if self.state is not FeedState.RECOVERING or is_waiting:
            return None
        if self._loading is None and not self._rate.allows(now):
            return None  # chunks are not limited: each question for one follows an answer
        self._questions += 1
        self.position.live_seq = 0
        self._asked = self._question()
        return self._asked

    def _question(self) -> ReplayRequest:
        ask = partial(ReplayRequest, VERSION, self._part, self._newest)
        if self._loading is not None:
            return ask(from_seq=0, snapshot_id=self._loading.id, chunk=self._loading.next_chunk)
        return ask(from_seq=0 if self._want_snapshot else self.seq + 1)

    def work(self, hashes: int, now: float) -> None:
        """Load ops of a snapshot that cost about as much as this many hashes (see `cost`)."""
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

    def _see(self, decoded: Decoded, size: int, now: float) -> Receipt:
        self.position.received_at = now
        self.counters.unknown_ops += decoded.unknown_ops
        if decoded.incarnation < self._newest:
            self.counters.stale += 1
            return STALE
        if decoded.incarnation > self._newest:
            self._meet(decoded.incarnation, decoded.seq - 1, now)
        self.position.source_seq = max(self.position.source_seq, decoded.seq)
        self.position.live_seq = max(self.position.live_seq, decoded.seq)
        if self.state is FeedState.BROKEN:
            return TAKEN  # the next snapshot contains it
        if self.state is not FeedState.LIVE:
            self._hold(decoded, size, now)
        elif decoded.seq <= self.seq:
            self.counters.repeated += 1
        elif decoded.seq > self.seq + 1:
            self.counters.gaps += 1
            self._hold(decoded, size, now)
            self._recover(now)
        elif trouble := self._apply(decoded, now):
            return Receipt(FrameVerdict.TAKEN, trouble)
        return TAKEN

    def _meet(self, incarnation: int, seq: int, now: float) -> None:
        """A greater incarnation: the source restarted. Before its first frame no snapshot is needed."""
        self.close()
        self.position.source_seq = self.position.live_seq = seq
        self._malformed_seq = self._bad_answers = 0
        self._doubts = Doubts()
        if seq > 0:
            self._wanted_incarnation = incarnation
            self._recover(now, snapshot=True)
            return
        self._sink.reset()
        self._go_on_from(incarnation, 0, now)

    def _apply(self, decoded: Decoded, now: float) -> str:
        """Apply the next frame; returns why its ops cannot be read, or nothing."""
        if decoded.ops is None:
            self._meet_malformed(decoded.seq, now)
            return decoded.trouble
        for op in decoded.ops:
            if isinstance(op, Check | CheckResumable):
                self._compare(op, now)
            elif trouble := self._sink.apply(op, now):
                self.counters.contradictions += 1
                self._doubt(f"contradicts itself: {trouble}", now)
            if self.state is not FeedState.LIVE and self._want_snapshot:
                return ""  # `seq` stays: the frame is not applied to its end, and the snapshot replaces it
        self.position.seq = decoded.seq
        self._backoff.reset()
        self.counters.applied += 1
        return ""

    def _meet_malformed(self, seq: int, now: float) -> None:
        """Ask for the frame again; if it is malformed a second time, ask for a snapshot."""
        self.counters.malformed += 1
        second = self._malformed_seq == seq
        self._malformed_seq = seq
        self._recover(now, snapshot=second)

    def _meet_other_version(self, version: int, now: float) -> None:
        """Set the flag and ask: an answer in this version proves a damaged byte and clears the flag."""
        self.counters.other_versions += 1
        self.flag = f"sends frames of version {version}; this replica reads version {VERSION}"
        if self.state is FeedState.LIVE:
            self._recover(now)

    def _compare(self, check: Check | CheckResumable, now: float) -> None:
        if self._sink.agrees(check):
            self._doubts.clear()
            self.flag = ""
            if self._doubts.may_fill_up(now) and self._sink.has_room_again():
                self._recover(now, snapshot=True)
            return
        self.counters.digest_mismatches += 1
        self._doubt("its digest keeps differing from the copy's", now)

    def _doubt(self, reason: str, now: float) -> None:
        """The copy differs from what the source has."""
        may_ask = self._doubts.add(now)
        if self._doubts.is_repeated:
            self.flag = reason
        if may_ask:  # else continue with the copy: a snapshot did not help a moment ago
            self._recover(now, snapshot=True)

    def _hold(self, decoded: Decoded, size: int, now: float) -> None:
        if not self._held.hold(decoded, size, self._questions):
            # without the held frames there is a gap before the next one: this recovery cannot end well
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

    def _replay(self, answer: ReplayFrames, now: float) -> Receipt:
        if self._want_snapshot:
            return STALE  # since the question something happened that frames cannot repair
        before = self.seq
        self._bad_answers = 0
        self._answered_at = now
        self.state = FeedState.LIVE
        troubles = [self._replay_frame(data, now) for data in answer.frames]
        self.counters.replayed += self.seq - before
        if answer.seq is not None:
            self._learn_end(answer.seq)
        troubles.append(self._catch_up(now))
        if self.state is FeedState.RECOVERING and self.seq == before:
            self._backoff.begin(now)
        return Receipt(FrameVerdict.TAKEN, next(filter(None, troubles), ""))

    def _learn_end(self, seq: int) -> None:
        """The source had sent `seq` frames when it answered: a higher number received before is damage."""
        self.counters.unsent += self._held.drop_unsent(seq, self._questions)
        self.position.source_seq = max(seq, self.position.live_seq)

    def _replay_frame(self, data: bytes, now: float) -> str:
        """Apply a frame of the ring if it is the next one; returns why it cannot be read, or nothing."""
        try:
            decoded = decode_frame(data)
        except MalformedFrameError as error:
            self._meet_malformed(self.seq + 1, now)
            return str(error)
        if decoded.version != VERSION:
            self._meet_other_version(decoded.version, now)
            return ""
        follows = decoded.incarnation == self.incarnation and decoded.seq == self.seq + 1
        return self._apply(decoded, now) if follows and self.state is FeedState.LIVE else ""

    def _go_on_from(self, incarnation: int, seq: int, now: float) -> None:
        """The sink has everything up to `seq` of `incarnation`: go on with what was held."""
        self.position.incarnation = self._wanted_incarnation = incarnation
        self.position.seq = seq
        self._want_snapshot = False
        self.state = FeedState.LIVE
        self._catch_up(now)

    def _catch_up(self, now: float) -> str:
        """Apply held frames; if they end before what the source has sent, ask for the rest.

        Returns why one of them cannot be read, or nothing.
        """
        trouble = self._drain_held(now)
        if self.state is FeedState.LIVE and self.seq < self.source_seq:
            self._recover(now)
        if self.state is not FeedState.LIVE:
            return trouble
        if not self._doubts.is_repeated:
            self.flag = ""
        if self._recovering_since is not None:
            self.counters.recovery_s = now - self._recovering_since
            self._recovering_since = None
        return trouble

    def _drain_held(self, now: float) -> str:
        """Apply held frames up to the next gap; frames behind it stay held."""
        while self._held and self.state is FeedState.LIVE:
            decoded = self._held.first
            if decoded.incarnation == self.incarnation and decoded.seq > self.seq + 1:
                self._recover(now)
                break
            self._held.pop()
            follows = decoded.incarnation == self.incarnation and decoded.seq == self.seq + 1
            if follows and (trouble := self._apply(decoded, now)):
                return trouble
        return ""

    def _take_chunk(self, chunk: SnapshotChunk, now: float) -> Receipt:
        if chunk.incarnation < self._newest:
            self._backoff.begin(now)
            return STALE
        loading = self._loading
        if loading is None or not loading.is_next(chunk):
            if chunk.chunk != 0:
                self._give_up_load()  # the source no longer keeps that snapshot: ask for a new one
                self._backoff.begin(now)
                return STALE
            self._sink.begin_load()
            loading = self._loading = Loading.begin(chunk)
        if isinstance(chunk, PartialChunk):
            self.counters.unknown_ops += chunk.unknown_ops
        loading.take(chunk)
        return TAKEN

    def _finish_load(self, loading: Loading, now: float) -> None:
        self._loading = None
        self._bad_answers = 0
        self._sink.finish_load()
        if loading.incarnation > self._newest:
            self.position.source_seq = 0  # the source restarted meanwhile: the old numbers are void
        self._answered_at = now
        self.position.source_seq = max(self.position.source_seq, loading.as_of_seq)
        self.counters.snapshots += 1
        self._doubts.renew()
        self._go_on_from(loading.incarnation, loading.as_of_seq, now)
        if self._want_snapshot:
            self._backoff.begin(now)  # the snapshot did not help: the frame after it may be poisoned

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
