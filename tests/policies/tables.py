"""Candidates written by hand, and moments with fixed or seeded random numbers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment, RoutingTables
from kvrouter.core.routing.candidates import Candidates, Roster, _Columns
from kvrouter.core.routing.policy import Candidate, Prompt, RouteRequest
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.heartbeats import RankBeat
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
    **facts: Any,  # fields of the card
) -> Candidate:
    """A worker with `overlap` of REQUEST's blocks, and with the load of other requests."""
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


def columns(candidates: Sequence[Candidate]) -> Candidates:
    """The same candidates as the pool forms them."""

    def column(amount: Callable[[Candidate], int]) -> array[int]:
        return array("q", [amount(one) for one in candidates])

    beats = [
        RankBeat(one.target.rank, 1, 0, waiting=one.waiting, kv_usage=one.kv_usage) for one in candidates
    ]
    made = Candidates(
        Roster([(one.target, Worker(one.card)) for one in candidates]),
        _Columns(
            column(lambda one: one.own_prefill_tokens),
            column(lambda one: one.own_decode_blocks),
            column(lambda one: one.overlap_blocks),
            column(lambda one: one.widest_blocks),
            column(lambda one: one.indexed_blocks),
            column(lambda one: one.charged_tokens),
            column(lambda one: one.active_blocks),
            column(lambda one: one.requests),
            column(lambda one: int(one.charged_tokens > 0)),  # one prefill that has just begun
            column(lambda one: one.charged_tokens),
            column(lambda _: 0),
            array("d", bytes(8 * len(candidates))),
            beats,
            max((one.overlap_blocks for one in candidates), default=0),
        ),
        {},
        BLOCK,
    )
    made._all = list(candidates)
    return made


def moment(chance: float = 0.0, *, now: float = 0.0, unseen: float = 0.0, **tables: Any) -> Moment:
    """A moment whose random number is always `chance`; `tables` are fields of RoutingTables."""
    return Moment(now, fixed(chance), RoutingTables(**tables), unseen)


def seeded(seed: int) -> Moment:
    """A moment with random numbers from this seed."""
    return Moment(0.0, random.Random(seed).random, RoutingTables())


def turns(
    policy: BuiltInPolicy, candidates: Sequence[Candidate], count: int, request: RouteRequest = REQUEST
) -> list[int]:
    """The places of `count` picks, each of them booked."""
    eligible, chance, places = columns(candidates), seeded(1), []
    for _ in range(count):
        places.append(policy.pick(request, eligible, chance))
        policy.routed(request, eligible[places[-1]], chance)
    return places


def picked(
    policy: BuiltInPolicy, candidates: Sequence[Candidate], request: RouteRequest = REQUEST, **tables: Any
) -> list[str]:
    """The workers picked over 60 random numbers: one name, or the names of a tie."""
    eligible = columns(candidates)
    chances = [step / 60 for step in range(60)]
    names = {eligible[policy.pick(request, eligible, moment(chance, **tables))].target for chance in chances}
    return sorted(str(name.worker_id) for name in names)
