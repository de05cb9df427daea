"""Heartbeats, hellos, and agents with the same worker id."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire.hashes import pool_token
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat, decode_worker_beat, encode
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.errors import ConfigError
from kvrouter.worker.announcer import SUSPECTED_BEATS, Announcer, TakenOverError
from tests.worker.fakes import FakeBus

SUBJECTS = Subjects("ns")
OWN = SUBJECTS.live_worker(WorkerId("w"))
CARD = Card(worker_id="w", url="http://e", model="m", block_size=16)
RANKS = [RankBeat(0, 7, 3)]


@pytest.fixture
def bus() -> FakeBus:
    """A bus that records messages."""
    return FakeBus()


@pytest.fixture
def announcer(bus: FakeBus) -> Announcer:
    """The announcer of worker w, started at 7."""
    return Announcer(bus, SUBJECTS, CARD, 7, lambda: RANKS)


def beats(bus: FakeBus) -> list[WorkerBeat]:
    """The heartbeats sent since the last call."""
    return [decode_worker_beat(payload, WorkerId(CARD.worker_id)) for _, payload in bus.take()]


def test_beat(bus: FakeBus, announcer: Announcer) -> None:
    """A heartbeat has state, pool and ranks; the first one has the card, and then one every 10 s."""
    for now in (0.0, 1.0, 9.9, 10.0):
        announcer.beat(now)

    sent = beats(bus)
    assert WorkerBeat(VERSION, 7, "up", pool_token("m"), RANKS, 1, CARD) == sent[0]
    assert [CARD, None, None, CARD] == [beat.card for beat in sent]


def test_card_of_an_engine_on_every_interface(bus: FakeBus) -> None:
    """Its URL has the address from which NATS is reached, as of each heartbeat."""
    card = replace(CARD, url="http://0.0.0.0:8000")
    announcer = Announcer(bus, SUBJECTS, card, 7, lambda: RANKS)

    for now, host in ((0.0, ""), (10.0, "10.0.0.5")):
        bus.local_host = host
        announcer.beat(now)

    urls = [beat.card.url for beat in beats(bus) if beat.card is not None]
    assert ["http://127.0.0.1:8000", "http://10.0.0.5:8000"] == urls


def test_card_while_away(bus: FakeBus, announcer: Announcer) -> None:
    """A card that could not be sent stays due."""
    bus.connected = False
    announcer.beat(0.0)
    bus.connected = True
    announcer.beat(1.0)

    assert [CARD] == [beat.card for beat in beats(bus)]


def test_worker_is_up_once_announced(bus: FakeBus, announcer: Announcer) -> None:
    """`worker.up` is logged once, when the first heartbeat is sent: not while NATS is away."""
    bus.connected = False
    with capture_logs() as logs:
        announcer.beat(0.0)
        assert not logs
        bus.connected = True
        announcer.beat(1.0)
        announcer.beat(2.0)

    assert [("worker.up", "w")] == [(entry["event"], entry["worker"]) for entry in logs]


def test_half_of_a_pair_is_up(bus: FakeBus, announcer: Announcer) -> None:
    """`worker.up` has the role and the connector."""
    announcer.update(replace(CARD, role="decode", kv_connector="nixl"))
    with capture_logs() as logs:
        announcer.beat(0.0)

    assert ("decode", "nixl") == (logs[0]["role"], logs[0]["kv_connector"])


def test_update(bus: FakeBus, announcer: Announcer) -> None:
    """A changed card gets a new version and is sent with the next heartbeat; the same card does not."""
    changed = Card(worker_id="w", url="http://e", model="m", block_size=32)
    announcer.beat(0.0)
    announcer.update(CARD)
    announcer.beat(1.0)
    announcer.update(changed)
    announcer.beat(2.0)

    assert [(1, CARD), (1, None), (2, changed)] == [(beat.card_version, beat.card) for beat in beats(bus)]


def test_leave(bus: FakeBus, announcer: Announcer) -> None:
    """The last heartbeat has the state `leave`."""
    announcer.leave()

    assert ["leave"] == [beat.state for beat in beats(bus)]


async def test_hello(bus: FakeBus, announcer: Announcer) -> None:
    """A hello is answered with the card at once, not at the next heartbeat."""
    await announcer.subscribe()
    task = asyncio.create_task(announcer.run(heartbeat_s=3600))
    await bus.until_sent(1)
    bus.take()

    bus.deliver(SUBJECTS.hello)
    bus.deliver(SUBJECTS.hello)
    await bus.until_sent(1)
    task.cancel()

    assert [CARD] == [beat.card for beat in beats(bus)]


async def test_state(bus: FakeBus, announcer: Announcer) -> None:
    """A new state is announced at once."""
    task = asyncio.create_task(announcer.run(heartbeat_s=3600))
    await bus.until_sent(1)
    announcer.set_state("down")
    await bus.until_sent(2)
    task.cancel()

    assert ["up", "down"] == [beat.state for beat in beats(bus)]


def test_card_that_readers_would_reject(bus: FakeBus, announcer: Announcer) -> None:
    """At the start it is an error; later the former card stays, and the reason is logged once."""
    bad = Card(worker_id="w", url="http://e:99999", model="m", block_size=16)
    with pytest.raises(ConfigError, match="'w' cannot be announced"):
        Announcer(bus, SUBJECTS, bad, 7, list)

    with capture_logs() as logs:
        for _ in range(3):
            announcer.update(bad)
            announcer.beat(0.0)

    assert [CARD, None, None] == [beat.card for beat in beats(bus)]
    assert 1 == [entry["event"] for entry in logs].count("worker.card_rejected")


@pytest.mark.parametrize("running", [2**70, -1, 1e300])
def test_load_that_readers_would_reject(bus: FakeBus, running: int) -> None:
    """The heartbeat is sent without it: an odd number of the engine must not silence the worker."""
    odd = RankBeat(0, 5, 7, True, running, 3)
    announcer = Announcer(bus, SUBJECTS, CARD, 7, lambda: [odd])

    with capture_logs() as logs:
        announcer.beat(0.0)
        announcer.beat(1.0)

    assert [[RankBeat(0, 5, 7, True)]] * 2 == [beat.ranks for beat in beats(bus)]
    assert 1 == [entry["event"] for entry in logs].count("worker.load_rejected")


def receive(bus: FakeBus, incarnation: int) -> None:
    """Deliver a heartbeat with this incarnation on the announcer's own subject."""
    bus.deliver(OWN, encode(WorkerBeat(VERSION, incarnation, "up", "p", [], 1)))


async def test_namesake(bus: FakeBus, announcer: Announcer) -> None:
    """An agent gives way to a later one with its id; its echo and an earlier agent do not matter."""
    await announcer.subscribe()
    for now in range(2):
        announcer.beat(float(now))
        for incarnation in (6, 7, 8):
            receive(bus, incarnation)
        bus.deliver(OWN, b"noise")

    with pytest.raises(TakenOverError, match="'w' is also used by an agent that started later"):
        await announcer.run(heartbeat_s=3600)


@pytest.mark.parametrize("beats_between", [0, SUSPECTED_BEATS + 1])
async def test_namesake_received_once(bus: FakeBus, announcer: Announcer, beats_between: int) -> None:
    """One odd heartbeat ends no agent, even if it is repeated at once; nor do two long apart."""
    await announcer.subscribe()
    receive(bus, 2**60)
    receive(bus, 2**60)
    for now in range(beats_between):
        announcer.beat(float(now))
    receive(bus, 2**60)
    receive(bus, 2**61)

    assert not announcer._successor


async def test_interval(bus: FakeBus, announcer: Announcer) -> None:
    """Heartbeats have their interval: a replica with a shorter one must not take it for silence."""
    task = asyncio.create_task(announcer.run(heartbeat_s=2.5))
    await bus.until_sent(1)
    task.cancel()

    assert [2500] == [beat.interval_ms for beat in beats(bus)]
