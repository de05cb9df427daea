"""Bugs that NVIDIA Dynamo's router had with bookings, one test for each GitHub thread."""

from __future__ import annotations

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.wire.heartbeats import RankBeat, WorkerBeat
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import VERSION, AddRequest, Free, decode_frame
from kvrouter.core.wire.senders import SyncSource
from tests.convergence.bus import FINE, Weather
from tests.convergence.fleets import (
    LEASE_BEATS,
    Fleet,
    active,
    load_seen,
    pool,
    requests_seen,
    sync_reader,
)
from tests.convergence.replicas import SimReplica
from tests.convergence.world import Setup


def test_free_cannot_overtake_add_request() -> None:
    """#11992: the frame with the Free arrives first. It waits for the one before it; no load remains."""
    fleet = Fleet()
    owner, peer = fleet.replicas()
    owner.line.is_mute = True
    fleet.book(owner, 1)
    owner.drain_requests()
    fleet.pass_beats(0.01)
    source = SyncSource(PoolId(min(owner.replica.routers)), owner.replica.router_id)
    add, free = list(owner.replica.routers[source.pool].feed.source._ring)[-2:]
    assert [AddRequest, Free] == [type(op) for frame in (add, free) for op in decode_frame(frame).ops or ()]

    peer.replica.sync_frame(source, free, peer.now())
    peer.replica.sync_frame(source, add, peer.now())
    owner.line.mend()
    fleet.pass_beats(1)

    assert 0 == requests_seen(peer)
    assert 0 == peer.replica.readers[source].lag


def test_free_cannot_overtake_add_request_in_a_storm() -> None:
    """#11992: hundreds of short requests while messages are lost, repeated and late (see WatchedSink)."""
    fleet = Fleet(Setup(replicas=3, ring_frames=8, max_payload=200))
    fleet.net.weather = Weather(loss=0.2, repeat=0.2, slow=0.2)

    for _ in range(300):
        sim = fleet.rng.choice(fleet.replicas())
        fleet.book(sim, 1)
        sim.drain_requests()
    fleet.net.weather = FINE
    fleet.pass_beats(LEASE_BEATS)

    assert [{}, {}, {}] == [active(sim).owners() for sim in fleet.replicas()]


def test_crashed_replica_leaves_no_phantom_load() -> None:
    """#2840, #2889, #11303, #13718: its bookings go when its lease ends, not five minutes later."""
    fleet = Fleet()
    crashing, peer = fleet.replicas()
    fleet.book(crashing, 6)
    assert 6 == requests_seen(peer)

    fleet.crash(0)
    fleet.pass_beats(LEASE_BEATS)

    assert {(0, 0, 0)} == set(load_seen(peer).values())
    assert {} == active(peer).owners()


def test_long_live_requests_are_not_expired() -> None:
    """#2889, #13718: a request that runs for a quarter of an hour counts all that time."""
    fleet = Fleet()
    owner, peer = fleet.replicas()
    fleet.book(owner, 3)
    load = load_seen(owner)

    fleet.pass_beats(900)

    assert load == load_seen(owner) == load_seen(peer)


def test_a_replica_that_was_only_slow_gets_its_bookings_back() -> None:
    """#2889: its lease ends while it is away; after its next heartbeat its requests count again."""
    fleet = Fleet()
    slow, peer = fleet.replicas()
    fleet.book(slow, 4)
    slow.line.disconnect()
    fleet.pass_beats(LEASE_BEATS)
    assert 0 == requests_seen(peer)

    slow.line.connect()
    fleet.pass_beats(1)

    assert load_seen(slow) == load_seen(peer)
    assert 4 == requests_seen(peer)


def test_a_joining_replica_learns_active_load() -> None:
    """From Dynamo's source: a joiner starts with zero load. Here it has the bookings of all peers."""
    fleet = Fleet(Setup(replicas=3, max_payload=200))
    fleet.crash(2)
    for sim in fleet.replicas():
        fleet.book(sim, 8)
        for _ in range(10):
            sim.act(fleet.rng)
    fleet.pass_beats(1)

    fleet.start(2)
    fleet.pass_beats(1)

    joined = fleet.replica_at(2)
    assert load_seen(fleet.replica_at(0)) == load_seen(joined)
    assert requests_seen(joined) == sum(len(sim.running) for sim in fleet.replicas())
    assert [] == joined.replica.readiness.not_ready(joined.now())


def test_joiner_decides_as_if_it_had_seen_all_traffic() -> None:
    """From Dynamo's source: a joiner without bookings sends its first request to the busiest worker."""
    fleet = Fleet(Setup(agents=3))
    fleet.crash(1)
    fleet.book(fleet.replica_at(0), 8)

    fleet.start(1)
    fleet.pass_beats(1)

    request = RouteRequest("req", (Prompt([1, 2, 3], 6),))
    assert pool(fleet.replica_at(0)).candidates(request) == pool(fleet.replica_at(1)).candidates(request)


def test_sync_frames_are_numbered() -> None:
    """From Dynamo's source: sync events have no numbers. Here a lost one leaves a gap and is fetched."""
    fleet = Fleet()
    owner, peer = fleet.replicas()
    fleet.book(owner, 1)
    peer.line.is_deaf = True
    fleet.book(owner, 1)
    peer.line.is_deaf = False

    fleet.book(owner, 1)
    fleet.pass_beats(0.1)

    assert 3 == requests_seen(peer)
    assert 1 == sync_reader(peer, owner).counters.gaps


def test_draining_leaks_no_bookings() -> None:
    """#13559, #11915: a worker leaves before its requests end; they count until their owner ends them."""
    fleet = Fleet(Setup(agents=1))
    owner, peer = fleet.replicas()
    fleet.book(owner, 5)

    fleet.agent_at(0).leave()
    fleet.pass_beats(LEASE_BEATS)
    assert {owner.replica.router_id: 5} == active(owner).owners() == active(peer).owners()
    owner.drain_requests()
    fleet.pass_beats(0.1)

    assert {} == active(owner).owners() == active(peer).owners()


def say_load(sim: SimReplica, fleet: Fleet, waiting: int | None) -> None:
    """A heartbeat of worker 0 with this load arrives."""
    agent = fleet.agent_at(0)
    publisher = agent.publishers[0]
    ranks = [RankBeat(0, publisher.incarnation, publisher.seq, waiting=waiting)]
    beat = WorkerBeat(VERSION, publisher.incarnation, "up", str(agent.pool_id), ranks, 1)
    sim.replica.worker_heartbeat(WorkerId(agent.card.worker_id), encode_beat(beat), sim.now())


def waiting_seen(replica: Replica) -> int | None:
    """Waiting requests at worker 0, in the candidates."""
    request = RouteRequest("req", (Prompt([1], 2),))
    return replica.routers[min(replica.routers)].pool.candidates(request)[0].waiting


def test_overloaded_clears() -> None:
    """#12514, #7753, #10564, #14213: one owner per load signal.

    Only a worker's heartbeat changes the load that it reports.
    """
    fleet = Fleet(Setup(agents=1))
    owner, peer = fleet.replicas()
    say_load(peer, fleet, waiting=40)
    assert 40 == waiting_seen(peer.replica)

    fleet.book(owner, 3)
    fleet.book(peer, 2)
    assert 40 == waiting_seen(peer.replica)
    say_load(peer, fleet, waiting=0)

    assert 0 == waiting_seen(peer.replica)
    assert 5 == requests_seen(peer)
    say_load(peer, fleet, waiting=None)
    assert waiting_seen(peer.replica) is None
