"""A frontend that cannot keep up with NATS: real drops, by itself and by the server, and their repair."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import SequenceHash, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, Stored, decode_request
from tests.conftest import NatsServer
from tests.frontend.fleet import POOL, Fleet, FleetOf, running_fleet
from tests.frontend.workers import until

WORKER = WorkerId("w0")
Message = tuple[str, bytes]


class Publisher:
    """The KV feed of worker w0, and what its engine holds."""

    def __init__(self, fleet: Fleet) -> None:
        self._source = FeedSource(5, lambda _now: [Stored(0, None, pack_hashes(self._held))])
        self._fleet = fleet
        self._held: list[SequenceHash] = []
        self._rng = random.Random(4)

    async def begin(self) -> None:
        """Answer replays and hellos, as an agent does, and return when the frontend follows the feed."""
        bus, subjects = self._fleet.bus, self._fleet.subjects
        await bus.subscribe(subjects.kv_replay(WORKER), self._answer)
        await bus.subscribe(subjects.hello, lambda *_: self.beat())
        self.beat()
        for subject, frame in self.frames(3):
            bus.publish(subject, frame)
        await until(self.is_known, "the feed is followed")

    def frames(self, count: int) -> list[Message]:
        """`count` frames of eight new blocks each, not sent."""
        subject = self._fleet.subjects.live_kv(POOL, WORKER, 0)
        made = []
        for _ in range(count):
            hashes = [SequenceHash(self._rng.getrandbits(64)) for _ in range(8)]
            self._held += hashes
            made += [
                (subject, frame) for frame in self._source.append([Stored(0, None, pack_hashes(hashes))])
            ]
        return made

    def beat(self) -> None:
        """Publish a heartbeat with the feed's seq."""
        beat = WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 5, self._source.seq)], 1)
        self._fleet.bus.publish(self._fleet.subjects.live_worker(WORKER), encode(beat))

    def is_known(self) -> bool:
        """Whether the frontend's index holds exactly these blocks."""
        index = self._fleet.frontend.replica.routers[POOL].pool.index
        return index.digest(Target(WORKER)) == (len(self._held), sum(self._held) % 2**64)

    def _answer(self, _subject: str, data: bytes, reply: str) -> None:
        answer = self._source.answer(decode_request(data), self._fleet.bus.max_payload, 0.0)
        self._fleet.bus.publish(reply, answer)


def burst(nats_url: str, messages: Iterable[Message]) -> None:
    """Send these to a server while the event loop is blocked."""
    address = urlsplit(nats_url)
    commands = b"".join(b"PUB %s %d\r\n%s\r\n" % (to.encode(), len(data), data) for to, data in messages)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as connection:
        connection.sendall(b'CONNECT {"verbose":false}\r\n' + commands + b"PING\r\n")
        said = b""
        while b"PONG" not in said:
            said += connection.recv(4096)
    assert b"-ERR" not in said


def reader(fleet: Fleet) -> FeedReader:
    """The frontend's side of the feed."""
    (found,) = fleet.frontend.replica.readers.values()
    return found


@pytest.mark.parametrize(("count", "repair"), [(2000, "replayed"), (5000, "snapshots")])
async def test_inbox_drops(
    fleet_of: FleetOf,
    nats_url: str,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    repair: str,
) -> None:
    """Messages that a full inbox drops are counted, logged once and repaired: by replay or snapshot."""
    monkeypatch.setattr("kvrouter.replica.inbox.INBOX_BYTES", 4096)
    async with fleet_of("--router-mode", "kv", publishes_events=True) as fleet:
        publisher = Publisher(fleet)
        await publisher.begin()
        before = reader(fleet).counters.gaps
        noise = [(f"{fleet.subjects.live[:-1]}noise.{number}", b"x" * 50) for number in range(500)]

        burst(nats_url, publisher.frames(count) + noise)
        publisher.beat()
        await until(publisher.is_known, "the index is whole again")

        counters = reader(fleet).counters
        assert counters.gaps > before
        assert getattr(counters, repair) > 0
        assert 0 == counters.digest_mismatches
        assert 1 == len(fleet.logged("feed.inbox_full"))
        assert not fleet.logged("nats.error")
        dropped = fleet.frontend.replica_loop.inbox.drops
        assert dropped > 100
        counted = f'kvrouter_bus_messages_total{{event="dropped"}} {float(dropped)}'
        assert counted.encode() in (await fleet.get("/metrics")).body


async def test_the_server_drops_the_connection(
    new_nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    """A server closes a connection that does not read: the bus reconnects and the feed is repaired."""
    config = tmp_path / "nats.conf"
    config.write_text("max_pending: 1100000\nwrite_deadline: '100ms'\n")
    server = new_nats_server(config)
    server.start()
    async with running_fleet(server.url, "--router-mode", "kv", publishes_events=True) as fleet:
        publisher = Publisher(fleet)
        await publisher.begin()
        counters = fleet.frontend.replica_loop._bus.counters
        noise = [(f"{fleet.subjects.live[:-1]}noise", bytes(1_000_000))] * 60

        burst(server.url, [*noise, *publisher.frames(500)])
        await until(lambda: counters.connections == 2, "it is connected again")
        await until(publisher.is_known, "the index is whole again")

        assert 1 == len(fleet.logged("nats.disconnected"))
        assert reader(fleet).counters.replayed > 0
        assert 200 == (await fleet.get("/ready")).status
        assert 200 == (await fleet.ask()).status
