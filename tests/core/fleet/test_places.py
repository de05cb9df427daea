"""Workers at the address of a replica are no targets."""

from __future__ import annotations

import pytest

from kvrouter.core.audit.findings import Audit
from kvrouter.core.fleet.places import place_of
from kvrouter.core.fleet.reached import AGAIN_S, FIRST_PAUSE_S
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import RouterBeat, State, encode
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION
from tests.core.replicas import PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, W1, card, request

URL = "http://10.0.0.7:8000"


def hear(replica: Replica, clients_url: str = URL, address: str = "", state: State = "up") -> None:
    """A peer's heartbeat with these addresses, which answer as the peer."""
    claim(replica, clients_url, address, state)
    while url := replica.peers.next_question(0.0):
        replica.answered(url, PEER, 0.0)


def claim(replica: Replica, clients_url: str = URL, address: str = "", state: State = "up") -> None:
    """A heartbeat with these addresses."""
    beat = RouterBeat(VERSION, 5, state, address, {}, 1, 1000, clients_url=clients_url)
    replica.router_heartbeat(PEER, encode(beat), 0.0)


def names(replica: Replica) -> list[str]:
    """The workers that are targets."""
    return [target.worker_id for target in replica.router(POOL).pool.targets]


def problem(replica: Replica) -> str:
    """Of w1, as the audit finds it."""
    audit = Audit(replica)
    audit.run()
    (found,) = audit.problems(POOL, W1)
    assert "loop" == found.kind
    assert [f"{POOL}: worker w1 {found.text}"] == audit.degrading()
    return found.text


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://127.0.0.1:8000", "localhost:8000"),
        ("http://127.9.9.9:8000/v1", "localhost:8000"),
        ("http://[::1]:8000", "localhost:8000"),
        ("http://[::ffff:127.0.0.1]:8000", "localhost:8000"),
        ("http://[::ffff:10.0.0.7]:8000", "10.0.0.7:8000"),
        ("http://0.0.0.0:8000", "localhost:8000"),
        ("http://[::]:8000", "localhost:8000"),
        ("http://LocalHost.:8000", "localhost:8000"),
        ("http://r1.localhost:8000", "localhost:8000"),
        ("http://Router-1.example:8000", "router-1.example:8000"),
        ("http://[2001:DB8:0::1]", "2001:db8::1:80"),
        ("https://router", "router:443"),
        ("", ""),
    ],
)
def test_one_spelling(url: str, place: str) -> None:
    """Ways to write one address are one place; a path does not matter."""
    assert place == place_of(url)


@pytest.mark.parametrize("is_first", [True, False], ids=["the card first", "the address first"])
def test_own_address(is_first: bool) -> None:
    """The card of a replica's own address is refused by name, whatever came first, and w2 serves."""
    replica = new_replica()
    if not is_first:
        replica.listen_at(["http://0.0.0.0:8000"])
    receive_worker(replica, card("w1", url="http://localhost:8000"))
    receive_worker(replica, card("w2"))
    if is_first:
        assert ["w1", "w2"] == names(replica)
        replica.listen_at(["http://0.0.0.0:8000"])

    assert ["w2"] == names(replica)
    text = problem(replica)
    for part in ("the address of this replica", "http://localhost:8000", "--engine-url"):
        assert part in text
    refusals = replica.router(POOL).pool.refusals(request())
    assert ["has the address of this replica"] == list(refusals.values())


@pytest.mark.parametrize(("clients_url", "address"), [(URL, ""), ("", URL)])
def test_address_of_a_peer(clients_url: str, address: str) -> None:
    """Both addresses of a peer count, also where the worker is known before the peer, until the peer ends."""
    replica = new_replica()
    receive_worker(replica, card("w1", url=URL))
    receive_worker(replica, card("w2"))
    hear(replica, clients_url, address)

    assert ["w2"] == names(replica)
    assert f"the address of replica {PEER}" in problem(replica)
    hear(replica, state="leave")
    assert ["w1", "w2"] == names(replica)


def test_lost_peer() -> None:
    """An engine may have the address of a replica whose lease has ended."""
    replica = new_replica()
    hear(replica)
    receive_worker(replica, card("w1", url=URL))
    assert [] == names(replica)

    for _ in range(2 * ROUNDS):
        receive_worker(replica, "w1")
        rounds(replica, 1)
    replica.settle()

    assert ["w1"] == names(replica)


def test_worker_moves() -> None:
    """A card with the right address makes the worker a target again."""
    replica = new_replica()
    replica.listen_at([URL])
    receive_worker(replica, card("w1", url=URL))
    assert [] == names(replica)

    receive_worker(replica, card("w1", url="http://10.0.0.8:8000"))

    assert ["w1"] == names(replica)


@pytest.mark.parametrize("answer", ["", "other", "me"])
def test_address_that_does_not_answer_as_a_replica(answer: str) -> None:
    """A forged heartbeat takes no worker away: what answers at its address decides, not what it claims."""
    replica = new_replica()
    receive_worker(replica, card("w1", url=URL))
    receive_worker(replica, card("w2"))
    claim(replica)
    assert ["w1", "w2"] == names(replica)

    assert URL == replica.peers.next_question(0.0)
    replica.answered(URL, answer, 0.0)

    assert (["w2"] if answer else ["w1", "w2"]) == names(replica)
    assert not answer or {"other": "replica other", "me": "this replica"}[answer] in problem(replica)


def test_replica_that_no_longer_answers() -> None:
    """Its address may be an engine's now; one missed question proves nothing."""
    replica = new_replica()
    hear(replica)
    receive_worker(replica, card("w1", url=URL))
    now = AGAIN_S
    assert URL == replica.peers.next_question(now)
    replica.answered(URL, "", now)
    assert [] == names(replica)

    now += FIRST_PAUSE_S
    assert URL == replica.peers.next_question(now)
    replica.answered(URL, "", now)

    assert ["w1"] == names(replica)


def test_forged_address() -> None:
    """A worker that has answered as an engine stays a target, whatever a peer claims: the claim is named."""
    replica = new_replica()
    receive_worker(replica, card("w1", url=URL))
    replica.router(POOL).pool.workers[W1].is_engine = True
    hear(replica)

    assert ["w1"] == names(replica)
    assert f"replica {PEER} names its address" in problem(replica)
    receive_worker(replica, card("w1", url=URL, max_sequences=7))
    assert ["w1"] == names(replica)
    replica.listen_at([URL])
    assert [] == names(replica)


def test_forged_heartbeats_cost_little() -> None:
    """Heartbeats that change nothing do not build the targets again."""
    replica = new_replica()
    receive_worker(replica, card("w1"))
    hear(replica)
    before = replica.router(POOL).pool.changes

    for number in range(100):
        claim(replica, f"http://10.0.0.{number}:1")
        replica.listen_at([])

    assert before == replica.router(POOL).pool.changes
    assert WorkerId("w1") in replica.router(POOL).pool.workers
