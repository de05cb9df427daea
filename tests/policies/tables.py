"""Candidates written by hand, and states with a chance that is none or seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvrouter.core.routing.cost import Prompt
from kvrouter.core.routing.policy import Candidate, Policy, PolicyState, RouteRequest
from kvrouter.core.wire.ids import Target, WorkerId
from tests.core.worlds import card, chain_from, fixed

BLOCK = 16
BLOCKS = 10
ISL = BLOCKS * BLOCK
REQUEST = RouteRequest("req", (Prompt(chain_from(1000, BLOCKS), ISL),))
"""Ten blocks of 16 tokens."""


def target(name: str) -> Target:
    """Rank 0 of a worker."""
    return Target(WorkerId(name))


def candidate(
    name: str,
    *,
    overlap: int = 0,
    charged: int = 0,
    active: int = 0,
    requests: int = 0,
    waiting: int | None = 0,
    usage: float | None = 0.0,
    rank: int = 0,
    waiting_loras: Sequence[str] = (),
    running_loras: Sequence[str] | None = None,
    **facts: Any,  # the card's own fields
) -> Candidate:
    """What REQUEST finds on a worker with `overlap` of its blocks and so much load of others."""
    own_tokens = ISL - overlap * BLOCK
    return Candidate(
        target=Target(WorkerId(name), rank),
        overlap_blocks=overlap,
        widest_blocks=overlap,
        own_prefill_tokens=own_tokens,
        own_decode_blocks=BLOCKS,
        prefill_tokens=charged + own_tokens,
        prefill_blocks=(charged + own_tokens) / BLOCK,
        decode_blocks=active + BLOCKS,
        requests=requests,
        running=None,
        waiting=waiting,
        kv_usage=usage,
        card=card(name, **facts),
        tier_blocks=(overlap,),
        waiting_loras=waiting_loras,
        running_loras=running_loras,
    )


def state(chance: float = 0.0, **facts: Any) -> PolicyState:  # PolicyState's own fields
    """A state whose chance is always the same."""
    return PolicyState(fixed(chance), **facts)


def seeded(seed: int, **facts: Any) -> PolicyState:  # PolicyState's own fields
    """A state with real chance."""
    return PolicyState(random.Random(seed).random, **facts)


def picked(
    policy: Policy, candidates: Sequence[Candidate], request: RouteRequest = REQUEST, **facts: Any
) -> list[str]:
    """The workers that are picked for every chance there is: one name, or those of a tie."""
    chances = [step / 60 for step in range(60)]
    names = {
        candidates[policy.pick(request, candidates, state(chance, **facts))].target for chance in chances
    }
    return sorted(str(name.worker_id) for name in names)
