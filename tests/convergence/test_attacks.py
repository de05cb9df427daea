"""An attacker may publish anything on NATS: replicas stay up, and all copies are right within a minute."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.convergence.attacks import AttackedWorld
from tests.convergence.world import Setup
from tests.long import IS_LONG, examples


@pytest.mark.timeout(3600 if IS_LONG else 120)
@examples(300, 4)
@given(
    st.builds(
        Setup,
        seed=st.integers(0, 2**32),
        replicas=st.integers(1, 3),
        agents=st.integers(1, 3),
        ranks=st.sampled_from((1, 2)),
        tiers=st.sampled_from((1, 3)),
        ring_frames=st.sampled_from((4096, 8)),
        max_payload=st.sampled_from((1 << 20, 250)),
    ),
    st.sampled_from((3.0, 12.0)),
)
def test_attacked_fleet_heals(core: str, setup: Setup, seconds: float) -> None:
    """Nothing raises under attack; after it every copy equals its owner's state, and no memory is left."""
    world = AttackedWorld(setup)
    world.agenda.run(3.0)

    world.attack(messages=600 if IS_LONG else 250, seconds=seconds)

    event(f"heartbeats needed: {world.heal():2}")
    assert not (leftovers := world.leftovers()), leftovers
