"""Which changes of routing replicas follow: honest ones end alike, and no forged revision holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.routing_changes import LEAP, LEARNT_MOST
from kvrouter.core.wire.heartbeats import RouterBeat, RoutingChange, decode_router_beat, encode, standing
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import VERSION
from kvrouter.core.wire.values import MOST_NUMBER
from tests.core.replicas import ROUNDS, new_replica, rounds

FORGER = RouterId("forger")


def change(revision: int, epoch: int = 0, by: str = "peer") -> RoutingChange:
    """A change of one setting."""
    return RoutingChange(revision, by, {"router-temperature": f"{revision % 7}"}, epoch=epoch)


def fleet(*names: str, routing: RoutingChange | None = None, age: int = 0) -> list[Replica]:
    """Replicas that follow a change, and know each other since `age` rounds."""
    replicas = [new_replica(RouterId(name)) for name in names]
    for replica in replicas:
        replica.routing = routing
    rounds(replicas[0], age, *replicas[1:])
    return replicas


def forge(replica: Replica, forged: RoutingChange | None, name: RouterId = FORGER, number: int = 999) -> None:
    """Deliver a forged heartbeat."""
    beat = RouterBeat(VERSION, 1, "up", "", {}, number, routing=forged)
    replica.router_heartbeat(name, encode(beat), 0.0)


def post(replica: Replica, *, reset: bool = False) -> RoutingChange:
    """An operator changes the routing, or resets it, at this replica."""
    epoch, revision = standing(replica.routing)
    told = change(1, epoch + 1) if reset else change(revision + 1, epoch)
    replica.routing = msgspec.structs.replace(told, by=str(replica.router_id))
    return replica.routing


ABSURD = [
    change(MOST_NUMBER),
    change(LEAP + 3),
    change(LEARNT_MOST),
    change(1, LEAP + 1),
    change(LEAP + 1, 1),
]


@pytest.mark.parametrize("age", [0, ROUNDS, 3 * ROUNDS])
@pytest.mark.parametrize("forged", ABSURD)
def test_one_forged_heartbeat(forged: RoutingChange, age: int) -> None:
    """However young the replicas are, none follows it, now or later, and the next change holds in all."""
    replicas = fleet("a", "b", routing=change(1), age=age)
    for replica in replicas:
        forge(replica, forged)
        assert {FORGER: forged} == replica.refused_routing()

    told = post(replicas[0])
    for _ in range(3 * ROUNDS):
        rounds(replicas[0], 1, *replicas[1:])
        assert [told, told] == [replica.routing for replica in replicas]
    assert [{}, {}] == [replica.refused_routing() for replica in replicas]


def test_near_changes_are_followed_at_once() -> None:
    """Also a reset, and the last revision that is not too far ahead."""
    (replica,) = fleet("me")
    for near in (change(LEAP), change(2 * LEAP), change(1, 1), change(LEAP, LEAP + 1)):
        forge(replica, near)
        assert near == replica.routing


def test_reset_rules_out_every_older_revision() -> None:
    """Of earlier epochs nothing is followed, or refused: it is older."""
    replicas = fleet("a", "b", routing=change(MOST_NUMBER), age=1)
    told = post(replicas[1], reset=True)
    rounds(replicas[0], 1, *replicas[1:])
    assert [told, told] == [replica.routing for replica in replicas]

    forge(replicas[0], change(MOST_NUMBER))

    assert told == replicas[0].routing
    assert {} == replicas[0].refused_routing()


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("joiners", [1, 4])
@pytest.mark.parametrize("fleets", [change(5000), change(5000, 3), change(7, 5000)])
def test_joiners_learn_a_high_revision(fleets: RoutingChange, joiners: int, number: int) -> None:
    """Also several that join together, and more of them than there were before."""
    elders = fleet(*(f"a{n}" for n in range(number)), routing=fleets, age=3 * ROUNDS)
    joined = fleet(*(f"j{n}" for n in range(joiners)))

    rounds(elders[0], 2 * ROUNDS, *elders[1:], *joined)

    assert [fleets] * joiners == [replica.routing for replica in joined]


def test_joiner_hears_a_forged_low_revision_first() -> None:
    """It learns the real one nevertheless."""
    (elder,) = fleet("a", routing=change(5000), age=3 * ROUNDS)
    (joiner,) = fleet("j")
    forge(joiner, change(1))

    rounds(elder, 2 * ROUNDS, joiner)

    assert change(5000) == joiner.routing


def test_rolling_restart_beside_a_forger_who_never_stops() -> None:
    """Each replica that starts again learns what the others follow, not what one sender claims."""
    replicas = fleet("a", "b", routing=change(5000), age=3 * ROUNDS)
    for number in (0, 1):
        replicas[number] = new_replica(RouterId(f"again-{number}"))
        for _ in range(3 * ROUNDS):
            for replica in replicas:
                forge(replica, change(LEARNT_MOST))
            rounds(replicas[0], 1, *replicas[1:])
        assert [change(5000)] * 2 == [replica.routing for replica in replicas]


def test_alone_with_a_forger() -> None:
    """Nothing tells forged and real ones apart, but what it follows leaves room for the next change."""
    for forged, followed in ((change(MOST_NUMBER), None), (change(LEARNT_MOST), change(LEARNT_MOST))):
        (replica,) = fleet("me")
        for _ in range(3 * ROUNDS):
            forge(replica, forged)
            rounds(replica, 1)
        assert followed == replica.routing


def test_settled_replica_votes() -> None:
    """As configured since two leases, it does not follow a single sender that is far ahead."""
    (replica,) = fleet("me", age=2 * ROUNDS)
    for _ in range(3 * ROUNDS):
        forge(replica, change(5000))
        rounds(replica, 1)

    assert replica.routing is None
    assert {FORGER} == replica.refused_routing().keys()


def test_replica_that_was_cut_off_catches_up() -> None:
    """The others have made more changes meanwhile than LEAP."""
    replicas = fleet("a", "b", "c", age=3 * ROUNDS)
    for replica in replicas[:2]:
        replica.routing = change(5000)

    rounds(replicas[0], 1, *replicas[1:])

    assert [change(5000)] * 3 == [replica.routing for replica in replicas]


_steps = st.tuples(
    st.sampled_from(("post", "reset", "beat", "round", "forge", "restart")),
    st.integers(0, 2),
    st.integers(0, 2),
)


@given(
    st.sampled_from((0, 1, 5000)),
    st.lists(_steps, max_size=60),
    st.sampled_from(((MOST_NUMBER, 0), (1, MOST_NUMBER), (LEARNT_MOST + LEAP + 1, 0))),
)
def test_all_orders_end_alike(
    revision: int, steps: list[tuple[str, int, int]], forged: tuple[int, int]
) -> None:
    """Heartbeats in any order or lost, and forged ones between: the latest honest change holds in all."""
    replicas = fleet("a", "b", "c", routing=change(revision) if revision else None, age=3 * ROUNDS)
    restarted: set[int] = set()
    for step, one, other in steps:
        sender, receiver = replicas[one], replicas[other]
        if step in ("post", "reset"):
            post(sender, reset=step == "reset")
        elif step == "beat":
            receiver.router_heartbeat(sender.router_id, encode(sender.heartbeat("up", "")), 0.0)
        elif step == "round":
            sender.next_round(0.0)
            sender.router_heartbeat(sender.router_id, encode(sender.heartbeat("up", "")), 0.0)
        elif step == "forge":
            forge(receiver, change(*forged))
        elif not restarted:
            restarted.add(one)
            replicas[one] = new_replica(RouterId(f"again-{one}"))

    honest = max((standing(replica.routing) for replica in replicas), default=(0, 0))
    rounds(replicas[0], 3 * ROUNDS, *replicas[1:])

    assert {honest} == {standing(replica.routing) for replica in replicas}
    assert 1 == len({msgspec.msgpack.encode(replica.routing) for replica in replicas})


def test_older_replicas_read_a_change() -> None:
    """They ignore the epoch; theirs is 0."""

    class Older(msgspec.Struct, array_like=True):
        revision: int
        by: str
        settings: dict[str, str]
        who: str = ""
        why: str = ""

    read = msgspec.msgpack.decode(encode(change(3, 2)), type=Older)
    theirs = encode(RouterBeat(VERSION, 1, "up", "", {}, 1))
    older = decode_router_beat(encode([*msgspec.msgpack.decode(theirs)[:9], read]))

    assert change(3) == older.routing
