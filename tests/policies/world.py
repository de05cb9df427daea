"""A small fleet in virtual time, and prompts for it as segments that others may share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import SimulatedFleet
from kvrouter.lab.simulate.placement import SimulatedReplicas
from kvrouter.lab.simulate.step_model import H100

BLOCK = 16
ENGINE, ROOM_BLOCKS = replace(H100, block_size=BLOCK), 20_000


def arrival(at: float, segments: Sequence[tuple[int, int]], output_tokens: int = 32) -> Arrival:
    """A prompt as `(number, blocks)` of its segments: equal beginnings are shared prefixes.

    Its text has four characters per block.
    """
    chain: list[int] = []
    for number, blocks in segments:
        for place in range(blocks):
            chain.append(hash((chain[-1] if chain else 0, number, place)) & (1 << 64) - 1)
    text = "".join(chr(0x4E00 + number % 20_000) * 4 * blocks for number, blocks in segments)
    return Arrival(at, chain, len(chain) * BLOCK, output_tokens, text)


def fleet(
    policy: BuiltInPolicy,
    workers: int,
    *,
    joins: Mapping[str, float] | None = None,
    zones: Mapping[str, str] | None = None,
) -> SimulatedFleet:
    """Workers w1, w2, … and one router; `zones` are labels."""
    labels = {name: {"zone": zone} for name, zone in (zones or {}).items()}
    chance = random.Random(1)
    return SimulatedFleet(
        lambda agenda: SimulatedReplicas(agenda, [policy], chance),
        ENGINE,
        ROOM_BLOCKS,
        [1.0] * workers,
        joins=joins,
        labels=labels,
    )


def router_of(world: SimulatedFleet) -> Router:
    """The fleet's only router."""
    assert isinstance(world.placer, SimulatedReplicas)
    return world.placer.routers[0]
