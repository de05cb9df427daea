"""Plans of faults, drawn by Hypothesis, which shrinks a failing one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.convergence.poison import POISONS
from tests.convergence.world import Setup, Step

OUTAGES = ("mute", "deaf", "cut", "disconnect", "pause")
"""Faults that cut a process off; for the others it is only silent."""
KINDS = (
    "calm", "weather", "weather", "server", *OUTAGES, "split", "crash", "clock back", "die", "leave",
    "engine restart", "engine down", "lost history", "usurp", *POISONS,
)  # fmt: skip

setups = st.builds(
    Setup,
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 4),
    agents=st.integers(1, 4),
    ranks=st.sampled_from((1, 1, 2)),
    pools=st.sampled_from((1, 1, 2)),
    block_sizes=st.sampled_from((1, 1, 2)),
    tiers=st.sampled_from((1, 3)),
    ring_frames=st.sampled_from((4096, 8, 2)),
    max_payload=st.sampled_from((1 << 20, 250, 110)),
    snapshot_kept_s=st.sampled_from((10.0, 0.5)),
    is_busy=st.booleans(),
)
steps = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    who=st.integers(0, 7),
    seconds=st.sampled_from((0.3, 2.0, 9.0)),
    load=st.integers(0, 7),
    wait=st.sampled_from((0.05, 0.4, 1.5)),
)
plans = st.one_of(st.lists(steps, max_size=8), st.lists(steps, min_size=12, max_size=30))
histories: st.SearchStrategy[tuple[Setup, list[Any]]] = st.tuples(setups, plans)
