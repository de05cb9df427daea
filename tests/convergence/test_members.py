"""Members and their incarnations: regressions that histories have found."""

from __future__ import annotations

from tests.convergence.engines import LIBRARY
from tests.convergence.fleets import LEASE_BEATS, Fleet, kv_reader, pool
from tests.convergence.truth import differences
from tests.convergence.world import Setup, Step


def test_missing_card_is_requested() -> None:
    """A worker comes back after its lease. It publishes its card every 10 s only, so a hello asks for it."""
    fleet = Fleet(Setup(replicas=2, agents=2))
    agent = fleet.agent_at(0)
    agent.line.is_mute = True
    fleet.pass_beats(LEASE_BEATS + 2)  # its card was published, and not received
    assert ["w1"] == list(pool(fleet.replica_at(0)).workers)

    agent.line.is_mute = False
    fleet.pass_beats(2.5)

    assert [] == differences(fleet)


def test_hello_is_not_published_in_every_round() -> None:
    """An agent that does not receive the hello is asked again only after a lease."""
    fleet = Fleet(Setup(replicas=1))
    fleet.agent_at(0).line.is_mute = True
    fleet.pass_beats(LEASE_BEATS + 2)
    (sim,), hellos = fleet.replicas(), list[str]()
    fleet.agent_at(1).line.listen("kvrouter.sim.hello", lambda subject, *_: hellos.append(subject))
    fleet.agent_at(0).line.mend()
    fleet.agent_at(0).line.is_deaf = True

    fleet.pass_beats(5)

    assert 1 == len(hellos)
    assert 2 >= len(pool(sim).workers)


def test_life_of_a_feed_ends_with_its_lease() -> None:
    """A stopped agent resumes after its successor has started, with a greater incarnation of the feed.

    It ends a moment later; after its lease the successor is followed again.
    """
    fleet = Fleet(Setup(replicas=1, agents=1))
    fleet.fill_cache(range(3))
    older, greater = fleet.agent_at(0), 10**16
    older.line.is_deaf = True
    fleet.follow([Step("usurp", 1, wait=1.0)])
    older.lose_history(0, greater)
    older.hear(0, lambda publisher: publisher.stored([1], LIBRARY.tokens([0])))
    fleet.pass_beats(0.1)
    assert greater == kv_reader(fleet.replica_at(0), fleet.agent_at(0)).incarnation
    older.line.is_deaf = False
    fleet.pass_beats(LEASE_BEATS + 1)

    assert not older.is_alive
    assert [] == differences(fleet)


def test_two_lives_of_one_worker() -> None:
    """The agent that started later stays; the older one ends at its heartbeat, with any state of feeds."""
    fleet = Fleet(Setup(agents=1))

    fleet.follow([Step("usurp", 2, wait=2.5)])  # two of its heartbeats arrive

    assert [False] == [stray.is_alive for stray in fleet.strays]
    assert [] == differences(fleet)


def test_lower_incarnation_counts_after_the_lease() -> None:
    """The clock was set back between two lives of an agent: it is followed after the lease."""
    fleet = Fleet(Setup(agents=2))
    fleet.fill_caches()

    fleet.follow([Step("clock back", 2, seconds=0.5, wait=2.0)])
    assert differences(fleet)
    fleet.pass_beats(2 * LEASE_BEATS)

    assert [] == differences(fleet)
