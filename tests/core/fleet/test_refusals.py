"""What is kept of each sender, in bytes, and which senders are refused."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from kvrouter.core.audit.findings import Audit
from kvrouter.core.fleet.peers import PEERS_MOST
from kvrouter.core.fleet.refusals import (
    NAMED_MOST,
    PEER_BYTES,
    WORKER_BYTES,
    Budget,
    Refusals,
    card_bytes,
)
from kvrouter.core.fleet.replica import REFUSED_LEASES, Replica
from kvrouter.core.wire.heartbeats import Heard, RankBeat, RouterBeat, encode
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION
from tests.core.replicas import PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, W1, card, worker_beat

LARGE = tuple(f"adapter-{number}" * 10 for number in range(3000))


@pytest.fixture
def replica() -> Replica:
    """It knows w1."""
    replica = new_replica()
    receive_worker(replica, card("w1"))
    return replica


def refused(replica: Replica) -> list[str]:
    """As the audit, `/workers` and `/ready` name them."""
    audit = Audit(replica)
    audit.run()
    assert audit.strangers() == [one for one in audit.degrading() if " is refused: " in one]
    return audit.strangers()


def test_budget() -> None:
    """One sender and all have a bound; what was counted before is replaced, and a refusal counts nothing."""
    budget: Budget[str] = Budget(10, 25)

    assert ["", "", ""] == [budget.take(name, 8) for name in "abc"]
    assert "one may take 10" in budget.take("a", 11)
    assert "may take 25" in budget.take("d", 2)
    assert ("", "") == (budget.take("a", 1), budget.take("d", 2))
    assert 19 == budget.used
    budget.free("b")
    budget.free("b")
    assert 11 == budget.used


def test_large_card(replica: Replica) -> None:
    """A card beyond its budget is refused by name, and what was known of the worker stays."""
    receive_worker(replica, card("w1", lora_names=LARGE))

    (reason,) = refused(replica)
    assert reason.startswith("worker w1 is refused: it takes ")
    assert f"one may take {WORKER_BYTES:,}" in reason
    assert () == replica.router(POOL).pool.workers[W1].card.lora_names
    receive_worker(replica, card("w1", lora_names=LARGE[:100]))
    assert [] == refused(replica)
    assert LARGE[:100] == replica.router(POOL).pool.workers[W1].card.lora_names


def test_many_cards(replica: Replica) -> None:
    """All cards together have a budget, too; a worker that leaves makes room."""
    names = LARGE[:1000]
    replica.worker_bytes = Budget(WORKER_BYTES, 10 * card_bytes(card("x", lora_names=names)))
    receive_worker(replica, card("w1"))
    for number in range(20):
        receive_worker(replica, card(f"x{number}", lora_names=names))

    assert 10 == len(replica.router(POOL).pool.workers)
    assert 11 == len(refused(replica))
    assert all("all of its kind take" in reason for reason in refused(replica))
    receive_worker(replica, "x0", state="leave")
    receive_worker(replica, card("x19", lora_names=names))
    assert 10 == len(replica.router(POOL).pool.workers)


def test_load_of_many_ranks(replica: Replica) -> None:
    """Load of ranks that the card does not have is not kept, and the rest has the worker's budget."""
    ranks = [RankBeat(rank, 100, 0, running_loras=LARGE[:20]) for rank in range(1024)]
    replica.worker_heartbeat(W1, encode(worker_beat("w1", ranks=ranks)), 0.0)
    assert [0] == list(replica.router(POOL).pool.workers[W1].ranks)
    assert [] == refused(replica)

    replica.worker_heartbeat(
        W1, encode(worker_beat("w1", ranks=[RankBeat(0, 100, 0, running_loras=LARGE)])), 0.0
    )

    assert 1 == len(refused(replica))


def test_large_heartbeat_of_a_replica(replica: Replica) -> None:
    """It is refused by name; the workers that it names, and too many peers, are not kept."""
    heard = {f"p{number}": Heard(1, 1, 0, 0) for number in range(1000)}
    beat = RouterBeat(VERSION, 5, "up", "", {}, 1, 1000, [f"w{n}" for n in range(4000)], {}, None, heard)
    replica.router_heartbeat(PEER, encode(beat), 0.0)
    kept = replica.peers[PEER]
    assert ([], None) == (kept.workers, kept.hears)

    serves = {f"pool-{number}-{'x' * 50}": 16 for number in range(1000)}
    beat = RouterBeat(VERSION, 5, "up", "", {}, 1, 1000, [], serves)
    replica.router_heartbeat(PEER, encode(beat), 0.0)

    (reason,) = refused(replica)
    assert (
        f"replica peer is refused: it takes 162,048 bytes of memory, and one may take {PEER_BYTES:,}"
        == reason
    )
    assert {} == replica.peers[PEER].serves


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"url": "http://169.254.169.254"}, "169.254.169.254 is link-local"),
        ({"rank_header": "x-request-id"}, "rank_header 'x-request-id'"),
    ],
)
def test_card_that_no_worker_has(replica: Replica, facts: dict[str, str], cause: str) -> None:
    """The problem names the worker and the cause, for some leases after the last such card."""
    receive_worker(replica, card("bad", **facts))

    (reason,) = refused(replica)
    assert reason.startswith("worker bad is refused: ")
    assert cause in reason
    rounds(replica, REFUSED_LEASES * ROUNDS)
    assert 1 == len(refused(replica))
    rounds(replica, 1)
    assert [] == refused(replica)


def test_worker_networks() -> None:
    """Workers elsewhere are refused, loopback, too; names are checked when they are resolved."""
    replica = new_replica()
    networks = (ip_network("10.0.0.0/8"),)
    replica.settings = replica.settings.__class__(worker_networks=networks)
    for name, host in {"a": "10.1.2.3", "b": "127.0.0.1", "c": "engine", "d": "192.168.0.1"}.items():
        receive_worker(replica, card(name, url=f"http://{host}:1"))

    assert [WorkerId("a"), WorkerId("c")] == list(replica.router(POOL).pool.workers)
    assert [
        f"worker {name} is refused: url http://{host}:1: {host} is in none of --worker-networks 10.0.0.0/8"
        for name, host in (("b", "127.0.0.1"), ("d", "192.168.0.1"))
    ] == refused(replica)


def test_refused_senders_are_bounded() -> None:
    """Each name is a stranger's choice: the first ones are named."""
    refusals = Refusals()
    for number in range(10 * NAMED_MOST):
        refusals.refuse(f"worker {number}", "x" * 10_000)

    assert NAMED_MOST == len(refusals.named())
    assert {300} == {len(reason) for reason in refusals.named().values()}
    refusals.accept("worker 0")
    refusals.accept("worker 0")
    assert "worker 0" not in refusals.named()


def test_too_many_replicas(replica: Replica) -> None:
    """Beyond PEERS_MOST they are refused by name."""
    for number in range(PEERS_MOST + 1):
        beat = RouterBeat(VERSION, 5, "up", "", {}, 1)
        replica.router_heartbeat(RouterId(f"p{number}"), encode(beat), 0.0)

    assert [f"replica p{PEERS_MOST} is refused: {PEERS_MOST} others are known"] == refused(replica)


def test_ranks_take_bytes() -> None:
    """A card that only names many ranks is counted by them."""
    assert card_bytes(card("w1", ranks=1001)) - card_bytes(card("w1")) >= 1000 * 200
