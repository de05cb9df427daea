"""Bugs that NVIDIA Dynamo's router had with the index, one test for each GitHub thread."""

from __future__ import annotations

from kvrouter.core.feeds.trust import FeedState
from tests.convergence.engines import LIBRARY, LIBRARY_SIZE
from tests.convergence.fleets import LEASE_BEATS, Fleet, index, kv_reader, pool
from tests.convergence.replicas import SimReplica
from tests.convergence.truth import copied_facts, differences, published_facts
from tests.convergence.world import Setup


def has_blocks_of(sim: SimReplica, fleet: Fleet, number: int = 0) -> bool:
    """Whether the replica's index holds exactly the agent's blocks, and the agent has some."""
    publisher = fleet.agent_at(number).publishers[0]
    facts = published_facts(publisher.blocks)
    return facts[0][0] > 0 and copied_facts(sim.replica, publisher.source) == facts


def test_router_restart_recovers_kv_state() -> None:
    """#1056, #4904: a replica that restarts has every worker's blocks within a heartbeat."""
    fleet = Fleet(Setup(tiers=3, max_payload=200))
    fleet.fill_caches()

    fleet.crash(0)
    fleet.start(0)
    fleet.pass_beats(1)

    restarted = fleet.replica_at(0)
    assert has_blocks_of(restarted, fleet, 0)
    assert has_blocks_of(restarted, fleet, 1)
    assert [] == restarted.replica.readiness.not_ready(restarted.now())


def test_router_restart_alone_recovers_kv_state() -> None:
    """#1056: also if it is the only replica, so that only the workers can answer."""
    fleet = Fleet(Setup(replicas=1))
    fleet.fill_caches()
    fleet.crash(0)
    fleet.fill_caches()

    fleet.start(0)
    fleet.pass_beats(1)

    assert has_blocks_of(fleet.replica_at(0), fleet, 0)
    assert [] == differences(fleet)


def test_snapshot_ids_do_not_reset_the_cursor() -> None:
    """#7072: after a snapshot the reader continues with the source's numbers, without asking again."""
    fleet = Fleet(Setup(replicas=1, agents=1, ring_frames=2, max_payload=200))
    (sim,), agent = fleet.replicas(), fleet.agent_at(0)
    sim.line.is_deaf = True
    for node in range(20):
        fleet.fill_cache(range(node, node + 1))
    sim.line.is_deaf = False
    fleet.pass_beats(2)
    reader = kv_reader(sim, agent)
    assert (1, agent.publishers[0].seq) == (reader.counters.snapshots, reader.seq)
    asked = sim.line.requests

    for node in range(20, LIBRARY_SIZE):
        fleet.fill_cache(range(node, node + 1))

    assert agent.publishers[0].seq == reader.seq > LIBRARY_SIZE
    assert (1, asked) == (reader.counters.snapshots, sim.line.requests)
    assert has_blocks_of(sim, fleet)


def test_recovery_stops_when_the_worker_leaves() -> None:
    """#10580: a snapshot is half loaded when its worker leaves.

    The rest is not requested, and the loaded blocks take no memory.
    """
    fleet = Fleet(Setup(replicas=1, max_payload=200))
    fleet.fill_cache(range(LIBRARY_SIZE))
    (sim,), agent = fleet.replicas(), fleet.agent_at(0)
    sim.line.disconnect()
    agent.lose_history(0, 10**16)
    fleet.fill_cache(range(LIBRARY_SIZE))
    sim.line.connect()
    while not kv_reader(sim, agent)._loading:
        fleet.pass_beats(0.001)

    agent.leave()
    fleet.pass_beats(0.01)
    asked = sim.line.requests
    fleet.pass_beats(LEASE_BEATS)

    assert [fleet.agent_at(1).card.worker_id] == list(pool(sim).workers)
    assert asked == sim.line.requests
    index(sim).check()
    assert (["w1"], 0) == ([target.worker_id for target in index(sim).targets()], len(index(sim)))


def test_recovery_stops_when_the_worker_crashes() -> None:
    """#10580: after a crash the requests end with the worker's lease."""
    fleet = Fleet(Setup(replicas=1))
    (sim,), agent = fleet.replicas(), fleet.agent_at(0)
    sim.line.is_deaf = True
    fleet.fill_cache(range(9))
    sim.line.is_deaf = False
    fleet.crash(1)
    fleet.pass_beats(LEASE_BEATS)
    asked = sim.line.requests

    fleet.pass_beats(60)

    assert asked == sim.line.requests
    assert agent.publishers[0].source not in sim.replica.readers


def test_not_ready_before_the_index_has_recovered() -> None:
    """#10803, #13403: while a snapshot arrives chunk by chunk, /ready names the feed it waits for."""
    fleet = Fleet(Setup(replicas=1, agents=1, max_payload=120))
    fleet.fill_cache(range(LIBRARY_SIZE))
    fleet.crash(0)
    fleet.start(0)
    sim, said = fleet.replica_at(0), set[str]()

    while reasons := sim.replica.readiness.not_ready(sim.now()):
        assert not has_blocks_of(sim, fleet) or "waiting for the answers to hello" in reasons
        said.update(reasons)
        fleet.pass_beats(0.001)

    assert has_blocks_of(sim, fleet)
    assert any(reason.startswith("kv w0/0: recovering") for reason in said)


def test_ready_does_not_turn_back() -> None:
    """#13403: a replica that was ready stays so while NATS is away, feeds lag, and all workers are gone."""
    fleet = Fleet()
    sim = fleet.replica_at(0)
    assert [] == sim.replica.readiness.not_ready(sim.now())

    sim.line.disconnect()
    fleet.pass_beats(30)
    sim.line.connect()
    fleet.crash(2)
    fleet.crash(3)
    fleet.pass_beats(30)

    assert [] == sim.replica.readiness.not_ready(sim.now())
    assert sim.replica.readiness.degraded()


def test_unknown_hash_in_a_removal_does_not_stop_the_batch() -> None:
    """#14652: at the agent and at the replica the rest of the removal is applied."""
    fleet = Fleet(Setup(replicas=1, agents=1))
    (sim,), agent = fleet.replicas(), fleet.agent_at(0)
    fleet.fill_cache(range(2))
    assert (2, sum(LIBRARY.sequences[:2]) % 2**64) == index(sim).digest(agent.publishers[0].source.target)

    agent.hear(0, lambda publisher: publisher.removed([4711, 1001, 4712]))
    fleet.pass_beats(0.1)

    assert LIBRARY.sequences[0] == index(sim).digest(agent.publishers[0].source.target)[1]
    index(sim).remove(agent.publishers[0].source.target, [4711, LIBRARY.sequences[0], 4712])
    assert (0, 0) == index(sim).digest(agent.publishers[0].source.target)


def test_a_feed_that_receives_nothing_is_reported() -> None:
    """#11473, #12095: frames do not arrive and requests for them fail; the replica reports it."""
    fleet = Fleet(Setup(replicas=1, agents=1))
    (sim,), agent = fleet.replicas(), fleet.agent_at(0)
    agent.line.is_deaf = True
    sim.line.is_deaf = True
    fleet.fill_cache(range(9))
    sim.line.is_deaf = False

    fleet.pass_beats(3)

    assert any(reason.startswith("kv w0/0: recovering") for reason in sim.replica.readiness.degraded())
    assert kv_reader(sim, agent).lag
    agent.line.mend()
    fleet.pass_beats(LEASE_BEATS)
    assert FeedState.LIVE is kv_reader(sim, agent).state
    assert has_blocks_of(sim, fleet)


def test_index_memory_does_not_grow() -> None:
    """#4429, #10774, #11678: after any churn it holds the engines' blocks, in no more slots than needed."""
    fleet = Fleet(Setup(tiers=3, ring_frames=8))

    for turn in range(60):
        fleet.fill_caches(20)
        place = 2 + turn % 2
        fleet.crash(place)
        fleet.start(place)
        fleet.pass_beats(0.5)
    fleet.pass_beats(LEASE_BEATS)

    assert [] == differences(fleet)
    assert max(index(sim)._slots._count for sim in fleet.replicas()) <= 24
