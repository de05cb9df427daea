"""Readiness: what a joiner waits for, once; and pools that only peers can serve."""

from __future__ import annotations

import itertools

import pytest

from kvrouter.core.fleet.block_size import NAMED_MOST
from kvrouter.core.fleet.readiness import CLAIMED_S, HELLO_S, UNANSWERED_MOST
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import RouterBeat, State, encode
from kvrouter.core.wire.ids import PoolId, RouterId
from kvrouter.core.wire.ops import VERSION
from kvrouter.core.wire.senders import SyncSource
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, card


@pytest.fixture
def replica() -> Replica:
    """A synced replica without workers and peers."""
    return new_replica()


def test_ready_replica_stays_ready(replica: Replica) -> None:
    """It is ready when hello is answered, a worker known and its feed live, and remains so."""
    assert ["waiting for the answers to hello", "no worker has been seen"] == replica.readiness.not_ready(0.0)
    assert ["no worker has been seen"] == replica.readiness.not_ready(HELLO_S)
    receive_worker(replica, card(), seq=5)
    assert ["kv w1/0: recovering, 5 frames behind"] == replica.readiness.not_ready(HELLO_S)
    receive_worker(replica, card(), seq=0, rank_incarnation=101, incarnation=101)
    assert [] == replica.readiness.not_ready(HELLO_S)

    receive_worker(replica, state="leave", incarnation=101)

    assert [] == replica.readiness.not_ready(HELLO_S)
    assert ["no worker is known"] == replica.readiness.degraded()


def test_readiness_is_latched(replica: Replica) -> None:
    """A replica that was ready stays so, even if no probe came before its only worker left."""
    receive_worker(replica, card())
    replica.readiness.not_ready(HELLO_S)
    receive_worker(replica, state="leave")

    assert [] == replica.readiness.not_ready(10.0)


def test_joiner_waits_for_workers_that_peers_know(replica: Replica) -> None:
    """A peer names a worker that did not answer hello in time."""
    peer = new_replica(PEER)
    for name in ("w1", "w2"):
        receive_worker(peer, card(name))
    receive_worker(replica, card("w1"))
    replica.router_heartbeat(PEER, encode(peer.heartbeat("up", "")), 0.0)
    assert [] == list(peer.heartbeat("up", "").workers)

    replica.router_heartbeat(PEER, encode(peer.heartbeat("up", "", names_workers=True)), 0.0)
    assert ["no heartbeat of worker w2 yet, which replica peer knows"] == replica.readiness.not_ready(HELLO_S)
    receive_worker(replica, "w2")  # without its card, which a hello asks for
    assert replica.readiness.not_ready(HELLO_S)

    receive_worker(replica, card("w2"))
    assert [] == replica.readiness.not_ready(HELLO_S)


def test_joiner_does_not_wait_for_dead_workers(replica: Replica) -> None:
    """A worker that a peer names and that stays silent for a lease is no longer awaited."""
    beat = RouterBeat(VERSION, 5, "up", "", {}, 1, 1000, [f"w{n}" for n in range(1, 9)])
    replica.router_heartbeat(PEER, encode(beat), 0.0)
    receive_worker(replica, card("w1"))
    assert 6 == len(replica.readiness.not_ready(HELLO_S))
    assert "no heartbeat of 2 other workers yet" == replica.readiness.not_ready(HELLO_S)[-1]

    for _ in range(ROUNDS):
        receive_worker(replica, "w1")
        rounds(replica, 1)

    assert [] == replica.readiness.not_ready(HELLO_S)


# Pools that only peers serve

URL = "http://10.0.0.2:8000"
OTHER = PoolId("qwen-0a1b2c3d")


def ready(router_id: RouterId, *pools: PoolId) -> Replica:
    """A replica that was ready once and has a worker in each of these pools."""
    replica = new_replica(router_id)
    for pool in pools:
        serve(replica, pool)
    replica.readiness.give_up_waiting()
    return replica


def serve(replica: Replica, pool: PoolId) -> None:
    """A heartbeat of a worker of the pool."""
    receive_worker(replica, card(f"{replica.router_id}-{pool[:4]}", model=pool[:4]), pool=pool)


def pass_rounds(count: int, *replicas: Replica) -> None:
    """Heartbeats of the replicas, and of their workers. Each replica's address answers as that replica."""
    answers = {f"http://10.0.0.{number}:8000": one.router_id for number, one in enumerate(replicas)}
    for _ in range(count):
        for replica in replicas:
            for router in list(replica.routers.values()):
                for worker_id, worker in list(router.pool.workers.items()):
                    receive_worker(replica, worker_id, pool=router.pool.id, state=worker.state)
        for one, address in zip(replicas, answers, strict=True):
            one.next_round(0.0)
            beat = encode(one.heartbeat("up", address))
            for listener in replicas:
                listener.router_heartbeat(one.router_id, beat, 0.0)
                reach(listener, answers)


def reach(replica: Replica, answers: dict[str, RouterId]) -> None:
    """Ask all addresses of its peers."""
    while url := replica.peers.next_question(0.0):
        replica.answered(url, answers.get(url, ""), 0.0)


def meet(replica: Replica, pool: PoolId = POOL) -> None:
    """The card of a worker of the pool, which is down."""
    receive_worker(replica, card("w1", model=pool[:4]), pool=pool, state="down")


def test_pool_that_peers_serve_and_this_replica_cannot(replica: Replica) -> None:
    """After a lease the replica should get no traffic, with the reason, until it has a target again."""
    replica.readiness.give_up_waiting()
    meet(replica)
    peer = ready(PEER, POOL)
    pass_rounds(ROUNDS - 1, peer, replica)
    assert [] == replica.readiness.unserved() == replica.readiness.doubts()

    pass_rounds(1, peer, replica)
    reason = f"pool {POOL}: peers serve it (peer), no target here: "
    assert [f"{reason}w1 down"] == replica.readiness.unserved()
    assert [] == peer.readiness.unserved() == replica.readiness.doubts()

    receive_worker(replica, "w1")
    assert [] == replica.readiness.unserved()


def test_pool_that_no_peer_serves(replica: Replica) -> None:
    """If no replica serves it, all stay ready."""
    replica.readiness.give_up_waiting()
    peer = ready(PEER)

    pass_rounds(3 * ROUNDS, peer, replica)

    assert [] == replica.readiness.unserved() == peer.readiness.unserved()


def test_one_replica_always_stays_ready() -> None:
    """For every combination of pools that three replicas serve, one of them stays ready."""
    pools = [POOL, OTHER, PoolId("phi-0a1b2c3d")]
    for first, second, third in itertools.combinations_with_replacement(range(8), 3):
        replicas = [
            ready(RouterId(f"r{number}"), *[pool for bit, pool in enumerate(pools) if served >> bit & 1])
            for number, served in enumerate((first, second, third))
        ]
        pass_rounds(ROUNDS, *replicas)

        assert not all(replica.readiness.unserved() for replica in replicas)


def test_replica_that_serves_stays_ready() -> None:
    """Whatever others serve besides, a replica that serves something gets traffic, and names the pool."""
    first, second = ready(ME, POOL), ready(PEER, POOL, OTHER)
    meet(first, OTHER)

    pass_rounds(2 * ROUNDS, first, second)

    assert [] == first.readiness.unserved() == second.readiness.unserved() == second.readiness.doubts()
    assert [f"pool {OTHER}: peers serve it (peer), no target here: w1 down"] == first.readiness.doubts()


@pytest.mark.parametrize("answer", ["", ME, "other"])
def test_address_that_does_not_answer_as_the_peer(replica: Replica, answer: str) -> None:
    """Its say does not count, and is named; its bookings are followed."""
    replica.readiness.give_up_waiting()
    meet(replica)
    for number in range(2 * ROUNDS):
        beat = RouterBeat(VERSION, 5, "up", URL, {POOL: 1}, number, 1000, [], {POOL: 16})
        replica.router_heartbeat(PEER, encode(beat), 0.0)
        reach(replica, {URL: RouterId(answer)})
        rounds(replica, 1)

    assert [] == replica.readiness.unserved()
    (doubt,) = replica.readiness.doubts()
    assert f"its address {URL} does not answer as that replica" in doubt
    assert {PEER} == {source.router_id for source in replica.readers if isinstance(source, SyncSource)}


def test_invented_pool(replica: Replica) -> None:
    """A pool of which no card has arrived here does not count, even if the claimant answers."""
    replica.readiness.give_up_waiting()
    for number in range(2 * ROUNDS):
        beat = RouterBeat(VERSION, 5, "up", URL, {}, number, 1000, [], {OTHER: 16})
        replica.router_heartbeat(PEER, encode(beat), 0.0)
        reach(replica, {URL: PEER})
        rounds(replica, 1)

    assert [] == replica.readiness.unserved()
    assert [
        f"pool {OTHER}: a replica says that it serves it, and no worker's card of it has arrived here"
    ] == (replica.readiness.doubts())


def test_forged_workers_delay_nothing_for_long(replica: Replica) -> None:
    """A forged peer names new workers all the time: a joiner waits for workers of its first lease only."""
    receive_worker(replica, card("w1"))
    for number in range(2 * ROUNDS + 1):
        names = [f"invented-{number}-{each}" for each in range(3)]
        beat = RouterBeat(VERSION, 5, "up", "", {}, number, 1000, names)
        replica.router_heartbeat(PEER, encode(beat), 0.0)
        receive_worker(replica, "w1")
        rounds(replica, 1)

    assert [] == replica.readiness.not_ready(HELLO_S)


def test_feeds_that_nobody_answers_for(replica: Replica) -> None:
    """A forged worker's or peer's feed is named, and awaited until some questions were in vain."""
    receive_worker(replica, card("w1"))
    receive_worker(replica, card("ghost", model="x"), seq=5, pool=OTHER)
    beat = RouterBeat(VERSION, 5, "up", "", {POOL: 7}, 1)
    replica.router_heartbeat(PEER, encode(beat), 0.0)
    now = HELLO_S
    assert 2 == len(replica.readiness.not_ready(now))

    for _ in range(UNANSWERED_MOST):
        now += 10.0
        for source, _request in replica.feeds.due(now, 16):
            replica.feeds.failed(source, now)

    assert [] == replica.readiness.not_ready(now)
    assert 2 == len([reason for reason in replica.readiness.degraded() if "recovering" in reason])


def test_each_serves_what_the_other_cannot() -> None:
    """Clients of one pool would lose as much as clients of the other gain: both replicas stay ready."""
    first, second = ready(ME, POOL), ready(PEER, OTHER)

    pass_rounds(2 * ROUNDS, first, second)

    assert [] == first.readiness.unserved() == second.readiness.unserved()


def test_cut_off_replica_does_not_become_unready(replica: Replica) -> None:
    """Without rounds, the last heartbeats of its peers prove nothing."""
    replica.readiness.give_up_waiting()
    receive_worker(replica, card("w1"))
    peer = ready(PEER, POOL)
    pass_rounds(ROUNDS, peer, replica)
    receive_worker(replica, state="leave")

    for _ in range(3 * ROUNDS):
        replica.next_round(0.0)

    assert [] == replica.readiness.unserved()


@pytest.mark.parametrize(
    ("state", "address", "is_ready"), [("draining", URL, True), ("up", "", True), ("up", URL, False)]
)
def test_peers_that_take_no_requests(replica: Replica, state: State, address: str, is_ready: bool) -> None:
    """A peer that drains, has no address (a library) or was not ready yet does not count."""
    replica.readiness.give_up_waiting()
    peer = new_replica(PEER)
    receive_worker(peer, card("w1"))
    if is_ready:
        peer.readiness.give_up_waiting()

    for _ in range(2 * ROUNDS):
        replica.router_heartbeat(PEER, encode(peer.heartbeat(state, address)), 0.0)
        rounds(replica, 1)

    assert [] == replica.readiness.unserved()


def test_peer_that_leaves(replica: Replica) -> None:
    """No peer serves the pool any more: this replica is ready again."""
    replica.readiness.give_up_waiting()
    meet(replica)
    peer = ready(PEER, POOL)
    pass_rounds(ROUNDS, peer, replica)
    assert replica.readiness.unserved()

    replica.router_heartbeat(PEER, encode(peer.heartbeat("leave", URL)), 0.0)

    assert [] == replica.readiness.unserved()


def test_one_forged_heartbeat(replica: Replica) -> None:
    """One forged heartbeat with a long interval, and so a long lease, does not make a replica unready."""
    replica.readiness.give_up_waiting()
    receive_worker(replica, card("w1"))
    beat = RouterBeat(VERSION, 5, "up", URL, {}, 1, 60_000, [], {POOL: 16, OTHER: 16})
    replica.router_heartbeat(PEER, encode(beat), 0.0)

    for _ in range(3 * ROUNDS):
        receive_worker(replica, "w1")
        rounds(replica, 1)
        assert [] == replica.readiness.unserved()

    assert [PEER] == list(replica.peers)


def test_few_pools_are_named(replica: Replica) -> None:
    """However many pools a peer claims to serve, the reasons name a bounded number."""
    replica.readiness.give_up_waiting()
    serves = {f"p{number}": 16 for number in range(500)}
    for _ in range(ROUNDS):
        for number in range(50):
            beat = RouterBeat(VERSION, 5, "up", URL, {}, 1, 1000, [], serves)
            replica.router_heartbeat(RouterId(f"r{number}"), encode(beat), 0.0)
        rounds(replica, 1)

    reasons = replica.readiness.doubts()

    assert [] == replica.readiness.unserved()
    assert 5 == len(reasons)
    assert all(len(reason) < 200 for reason in reasons)


def test_not_connected_is_not_ready() -> None:
    """Before a hello was published no reason is certain."""
    replica = new_replica(greets=False)

    assert "not connected to NATS yet" in replica.readiness.not_ready(100.0)
    assert not replica.readiness.has_greeted


@pytest.mark.parametrize("peers", [1, 10, 300])
def test_claimed_feeds_hold_up_a_joiner_for_one_short_time(replica: Replica, peers: int) -> None:
    """Peers that answer nothing, however many, are awaited for CLAIMED_S in all, and take one line each."""
    receive_worker(replica, card("w1"))
    for number in range(peers):
        beat = RouterBeat(VERSION, 5, "up", "http://127.0.0.1:9", {POOL: 7}, 1, 1000, [])
        replica.router_heartbeat(RouterId(f"ghost-{number}"), encode(beat), 0.0)

    reasons = replica.readiness.not_ready(CLAIMED_S - 0.1)
    assert "recovering" in reasons[0]
    assert min(peers, NAMED_MOST + 1) == len(reasons)
    assert (peers <= NAMED_MOST) or f"{peers - NAMED_MOST} other feeds are not live" == reasons[-1]
    assert [] == replica.readiness.not_ready(CLAIMED_S)
    assert len(replica.readiness.degraded()) <= NAMED_MOST + 1


@pytest.mark.parametrize("how", ["at its address", "a question"])
def test_peers_that_answer_are_awaited(replica: Replica, how: str) -> None:
    """The bookings of a real replica that is slow: it has answered at its address, or a question before."""
    receive_worker(replica, card("w1"))
    beat = RouterBeat(VERSION, 5, "up", URL, {POOL: 7}, 1, 1000, [])
    replica.router_heartbeat(PEER, encode(beat), 0.0)
    if how == "a question":
        ((source, _),) = replica.feeds.due(0.0, 16)
        replica.feeds.answered(source, b"", 0.0)
    else:
        reach(replica, {URL: PEER})

    assert [f"sync peer in {POOL}: recovering, 7 frames behind"] == replica.readiness.not_ready(CLAIMED_S)
