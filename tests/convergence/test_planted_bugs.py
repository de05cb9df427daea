"""The harness itself: with a bug planted in the protocol, the property must fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from kvrouter.core.feeds.buffers import HeldFrames
from kvrouter.core.feeds.lease import Leases
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.receipt import Receipt
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet import replica as replica_module
from kvrouter.core.fleet.block_size import PoolBlockSize
from kvrouter.core.fleet.peers import Peers
from kvrouter.core.wire.heartbeats import RouterBeat
from kvrouter.core.wire.ops import decode_frame
from kvrouter.core.wire.senders import SyncSource
from tests.convergence.plans import histories
from tests.convergence.replicas import WatchedReplica
from tests.convergence.world import Setup, Step, World, live_through

ENOUGH_HISTORIES = 60
"""Enough by far: without the bug, thousands pass."""


def is_seen(history: tuple[Setup, list[Any]]) -> bool:
    """Whether the property fails."""
    try:
        live_through(*history)
    except AssertionError:
        return True
    return False


def assert_seen() -> None:
    """Find a history of a fixed series that shows the bug; raises NoSuchExample if none does."""
    few = settings(
        max_examples=ENOUGH_HISTORIES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    find(histories, is_seen, settings=few, random=random.Random(1))


class SeesNoGaps(FeedReader):
    """Any frame counts as the next one, and a heartbeat's seq as applied."""

    def frame(self, data: bytes, now: float) -> Receipt:
        """Ignore the seq."""
        decoded = decode_frame(data)
        if self.state is FeedState.LIVE and decoded.incarnation == self.incarnation:
            self.position.seq = max(self.seq, decoded.seq - 1)
        return super().frame(data, now)

    def heartbeat(self, incarnation: int, seq: int, now: float) -> bool:
        """Ignore lost frames at the end."""
        if self.state is FeedState.LIVE and incarnation == self.incarnation:
            self.position.seq = max(self.seq, seq)
        return super().heartbeat(incarnation, seq, now)


class HoldsNothing(FeedReader):
    """A frame during a snapshot counts as applied, though it went into the slot that is replaced."""

    _is_loaded = False

    def _hold(self, *_: object) -> None:
        """Drop it."""

    def _finish_load(self, *facts: Any) -> None:
        self._is_loaded = True
        super()._finish_load(*facts)

    def _catch_up(self, now: float) -> str:
        if self._is_loaded:
            self.position.seq, self._is_loaded = max(self.seq, self.source_seq), False
        return super()._catch_up(now)


def test_gap_detection_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the property fails."""
    monkeypatch.setattr(replica_module, "FeedReader", SeesNoGaps)

    assert_seen()


def test_holding_live_frames_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that come while a snapshot is loaded must not be lost with the old slot."""
    monkeypatch.setattr(replica_module, "FeedReader", HoldsNothing)

    assert_seen()


def test_leases_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without leases, dead members stay."""
    monkeypatch.setattr(Leases, "round", lambda *_: [])

    assert_seen()


def assert_seen_only_then(plan: list[Step], plant: Callable[[], None], agents: int = 3) -> None:
    """The history fails with the bug and passes without. Places 0 and 1 are replicas, the others agents."""
    history = (Setup(agents=agents, block_sizes=2), plan)
    assert not is_seen(history)

    plant()

    assert is_seen(history)


def test_the_block_size_must_follow_most_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines with smaller blocks die: the pool takes the size of the remaining one."""
    assert_seen_only_then(
        [Step("calm", wait=7.0), Step("die", who=2), Step("die", who=4)],
        lambda: monkeypatch.setattr(PoolBlockSize, "next_round", keep_first_size),
    )


def keep_first_size(self: PoolBlockSize, *_: int) -> None:
    """The first size stays."""
    self._is_settled = True


def test_a_joiner_must_take_the_elders_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sizes have as many targets, and the pool keeps the larger: a replica that joins takes it, too."""
    assert_seen_only_then(
        [Step("crash", who=2, seconds=15.0, wait=16.0), Step("crash", who=1, seconds=0.3, wait=7.0)],
        lambda: monkeypatch.setattr(Peers, "sizes_of_elders", lambda *_: {}),
        agents=4,
    )


def test_feeds_of_peers_need_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them one frame with a huge incarnation ends a feed forever."""
    heard = Leases.renew

    def heard_but_sync(self: Leases[Any], source: object, interval_ms: int | None = None) -> None:
        if not isinstance(source, SyncSource):
            heard(self, source, interval_ms)

    assert_seen_only_then(
        [Step("frame of the future", who=0, load=9)],
        lambda: monkeypatch.setattr(Leases, "renew", heard_but_sync),
    )


def test_forged_held_frames_must_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one frame far ahead is a gap forever."""
    assert_seen_only_then(
        [Step("frame far ahead", who=0, load=9)],
        lambda: monkeypatch.setattr(HeldFrames, "drop_unsent", lambda *_: 0),
    )


def test_versions_must_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one frame of another version leaves a flag as long as the source is quiet."""

    def meet_other_version(self: FeedReader, version: int, now: float) -> None:
        self.flag = f"sends frames of version {version}"

    assert_seen_only_then(
        [Step("frame of version 2", who=2, load=0)],
        lambda: monkeypatch.setattr(FeedReader, "_meet_other_version", meet_other_version),
    )


def test_only_own_rounds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """If any heartbeat in a replica's name were a round, a forged one would end all leases."""

    def take_own_heartbeat(self: WatchedReplica, beat: RouterBeat, now: float) -> None:
        self._lose(self._leases.round(beat.round), now)

    assert_seen_only_then(
        [Step("round of the future", who=0), Step("die", who=1)],
        lambda: monkeypatch.setattr(WatchedReplica, "_take_own_heartbeat", take_own_heartbeat),
    )


def test_rounds_must_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """If rounds counted when they begin, a deaf replica would drop all members."""

    def next_round(self: WatchedReplica, now: float) -> None:
        super(WatchedReplica, self).next_round(now)
        self._lose(self._leases.round(self._round), now)

    monkeypatch.setattr(WatchedReplica, "next_round", next_round, raising=False)
    world = World(Setup())
    world.agenda.run(3.0)

    world.follow([Step("deaf", who=0, seconds=9.0, wait=9.0)])

    assert world.replicas()[0].replica.counters.replicas_lost
