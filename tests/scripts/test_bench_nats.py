"""The messages of `scripts/bench nats`: their number, and that real ones are not larger."""

from __future__ import annotations

import pytest

from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ops import VERSION, Stored
from scripts.kit.bench.nats import KV_FRAME, WORKER_BEAT, Load, main, messages_of

MANY = 2**50


def test_a_second_of_messages() -> None:
    """A heartbeat and the frames of each worker, a heartbeat and three frames a request of each replica."""
    made = messages_of(Load(workers=10, replicas=2, frames_s=20, requests_s=50))

    assert 10 * 21 + 2 * (1 + 150) == len(made)
    head, _, rest = made[0].partition(b"\r\n")
    assert b"PUB kvrouter.bench.live.worker.host-0-9000 %d" % WORKER_BEAT == head
    assert WORKER_BEAT + 2 == len(rest)


def test_real_messages_are_not_larger() -> None:
    """A heartbeat with its load, and a frame of five blocks."""
    beat = WorkerBeat(VERSION, MANY, "up", "model-12345678", [RankBeat(0, MANY, MANY)], 1, None, 1000)
    source = FeedSource(MANY, lambda _now: [])

    (frame,) = source.append([Stored(0, 2**63, pack_hashes(range(2**60, 2**60 + 5)))])

    assert len(encode(beat)) < WORKER_BEAT
    assert len(frame) < KV_FRAME


def test_measures(capsys: pytest.CaptureFixture[str]) -> None:
    """A short run with a real server delivers all that was published."""
    assert 0 == main(["--workers", "4", "--replicas", "2", "--seconds", "0.2"])

    assert "one NATS server, per second" in (said := capsys.readouterr().out)
    assert " 0." in said
