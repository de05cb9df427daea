"""Replicas agree in the end after any loss, repetition, delay, crash or partition.

See docs/concepts/design.md#agreement.

While faults run, a live copy is exact as of its frame and no booking's moments change places (see
truth.py, and WatchedSink). When they are over, every copy is its owner's truth within BOUND heartbeats.
"""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.convergence.plans import OUTAGES, histories, plans, setups
from tests.convergence.world import PINGS_S, Setup, Step, World, live_through
from tests.long import IS_LONG, examples

HISTORIES = 2000 if IS_LONG else 16


@pytest.mark.timeout(1200)  # 2,000 histories, or a failing one that is cut down
@settings(max_examples=HISTORIES)
@given(histories)
def test_every_copy_becomes_equal_to_its_owner(history: tuple[Setup, list[Step]]) -> None:
    """After the faults: the same blocks, the same bookings, no phantom, nothing lost, all readers live."""
    world = live_through(*history)

    event(f"heartbeats needed: {world.beats_needed:2}")


@settings(max_examples=HISTORIES // 4)
@given(
    setups,
    st.lists(
        st.builds(
            Step,
            kind=st.sampled_from(OUTAGES),
            who=st.just(0),
            seconds=st.floats(0.1, 30.0),
            load=st.integers(0, 5),
            wait=st.floats(32.0, 34.0),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_replica_that_is_cut_off_drops_no_member(setup: Setup, outages: list[Step]) -> None:
    """A replica that was deaf, mute, paused or away keeps all members it knew: they were not silent."""
    world = World(setup)
    world.agenda.run(3.0)
    cut_off = world.replicas()[0].replica

    world.follow(outages)

    assert (0, 0) == (cut_off.counters.replicas_lost, cut_off.counters.workers_lost)
    world.mend()
    world.settle()


@settings(max_examples=HISTORIES // 4)
@given(setups, st.floats(0.1, PINGS_S), st.integers(0, 5))
def test_stopped_server_ends_no_lease(setup: Setup, seconds: float, load: int) -> None:
    """nats-server stops for as long as clients tolerate it; the bursts after that end no lease."""
    world = World(setup)
    world.agenda.run(3.0)

    world.follow([Step("server", 0, seconds, load, wait=seconds + 3.0)])

    counters = [sim.replica.counters for sim in world.replicas()]
    assert {(0, 0)} == {(counted.replicas_lost, counted.workers_lost) for counted in counters}
    world.settle()


@examples(10)
@given(setups, plans)
def test_history_repeats_exactly(setup: Setup, plan: list[Step]) -> None:
    """The same seed and plan give the same messages at the same times."""
    first, second = (live_through(setup, plan) for _ in range(2))

    assert first.net.trace.intdigest() == second.net.trace.intdigest()
