"""The arithmetic of `scripts/bench lag`, and its mock workers, which send the same messages as agents."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvrouter.bus import Subjects
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.wire.heartbeats import decode_worker_beat
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import ReplayRequest, SnapshotChunk, decode_answer, encode
from kvrouter.core.wire.senders import KvSource, WorkerSource
from kvrouter.frontend.run import new_replica
from kvrouter.frontend.settings import parse_options
from scripts.kit.bench.lag import quantile
from scripts.kit.bench.mock_fleet import POOL, WINDOW, MockFleet, Worker

SUBJECTS = Subjects("test")


def fleet(workers: int) -> MockFleet:
    """A mock fleet."""
    rng = random.Random(1)
    return MockFleet([Worker(number, "http://127.0.0.1:1", SUBJECTS, rng) for number in range(workers)])


def messages(wire: bytes) -> Iterator[tuple[str, bytes]]:
    """Published messages, as subject and payload."""
    while wire:
        line, _, wire = wire.partition(b"\r\n")
        _, subject, size = line.split()
        yield subject.decode(), wire[: int(size)]
        wire = wire[int(size) + 2 :]


def test_a_replica_follows_the_mocks() -> None:
    """Frames are numbered without gaps, digests agree, and the blocks stay within the window."""
    mocks, replica = fleet(3), new_replica(parse_options([]))

    wire = mocks.begin() + b"".join(mocks.burst(5000)[2] + mocks.beats(3) for _ in range(4))
    for subject, data in messages(wire):
        match SUBJECTS.parse_live(subject):
            case WorkerSource(worker_id):
                replica.worker_heartbeat(worker_id, data, 0.0)
            case KvSource() as source:
                replica.feeds.kv_frame(source, data, 0.0)

    assert 3 == len(replica.readers)
    for followed, reader in replica.readers.items():
        assert FeedState.LIVE is reader.state, followed
        assert (0, 0, 0) == (reader.lag, reader.counters.gaps, reader.counters.digest_mismatches)
    index = replica.routers[POOL].pool.index
    assert 0 < index.blocks(Target(WorkerId("w0000"))) <= 125 + 64 * WINDOW


def test_burst() -> None:
    """About the requested number of blocks, half in frames of 8 and half in frames of 64."""
    mocks = fleet(2)
    mocks.begin()

    blocks, frames, wire = mocks.burst(10_000)

    sizes = [len(data) for _, data in messages(wire)]
    small = sum(size < 200 for size in sizes)
    assert 10_000 <= blocks < 10_064
    assert frames == len(sizes)
    assert 0.45 < small * 8 / blocks < 0.55


def test_replay_is_a_snapshot() -> None:
    """The answer to a replay request is a snapshot as of the worker's last frame."""
    mocks = fleet(1)
    mocks.begin()
    mocks.burst(500)
    request = encode(ReplayRequest(1, 0, 1, 5))

    ((subject, data),) = messages(mocks.answer(SUBJECTS.kv_replay(WorkerId("w0000")), request, b"inbox"))
    answer = decode_answer(data)

    assert "inbox" == subject
    assert isinstance(answer, SnapshotChunk)
    ((_, beat), *_) = messages(mocks.answer(SUBJECTS.hello, b"", b""))
    assert answer.as_of_seq == decode_worker_beat(beat, WorkerId("w0000")).ranks[0].seq


def test_quantiles() -> None:
    """Percentiles are interpolated within a bucket; the maximum is the last bucket with observations."""
    buckets = {0.001: 50.0, 0.002: 100.0, 0.005: 100.0, float("inf"): 100.0}

    assert 0.001 == quantile(buckets, 0.5)
    assert 0.0015 == quantile(buckets, 0.75)
    assert 0.002 == quantile(buckets, 1.0)
