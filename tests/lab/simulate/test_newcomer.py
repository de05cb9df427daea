"""Chats of which nearly everything is cached, and an engine without a cache."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from kvrouter.lab.simulate.agenda import Agenda
from kvrouter.lab.simulate.cells import policy_of
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import SimulatedFleet
from kvrouter.lab.simulate.placement import SimulatedReplicas
from kvrouter.lab.simulate.step_model import REFERENCE
from kvrouter.policies import PolicySettings

# 57 µs a token in full steps; about 16 answers of 100 tokens a second and engine
MODEL = replace(REFERENCE, block_size=16, max_num_seqs=16)
TRUE_S = MODEL.prefill_token_s + MODEL.base_s / MODEL.step_tokens
HISTORY = 6000


def chats(rate: float, seconds: float) -> tuple[list[Arrival], float]:
    """Forty chats once, then turns with 16 to 100 new tokens; and when the turns begin."""
    chance, names = random.Random("chats"), itertools.count(1)
    histories = [tuple(next(names) for _ in range(HISTORY // 16)) for _ in range(40)]
    arrivals = [Arrival(0.3 * place, history, HISTORY, 20) for place, history in enumerate(histories)]
    at = start = 0.3 * len(histories) + 1
    while at < start + seconds:
        at += chance.expovariate(rate)
        tail = chance.randint(16, 100)
        hashes = (*chance.choice(histories), *(next(names) for _ in range(tail // 16)))
        arrivals.append(Arrival(at, hashes, HISTORY + tail, 100))
    return arrivals, start


def test_a_new_engine_is_used_while_nearly_everything_is_cached() -> None:
    """The time of a token is known, so its prompts are not taken for ten times as long as they are."""
    arrivals, start = chats(rate=38.0, seconds=45.0)
    placers: list[SimulatedReplicas] = []

    def placer(agenda: Agenda) -> SimulatedReplicas:
        placers.append(SimulatedReplicas(agenda, [policy_of("kv", PolicySettings())], random.Random(0)))
        return placers[0]

    fleet = SimulatedFleet(placer, MODEL, 20_000, [1.0, 1.0], joins={"new": start + 15})
    run = fleet.run(arrivals)

    speed = placers[0].routers[0].tables.speeds.speed
    assert TRUE_S < speed.seconds_per_token < 1.1 * TRUE_S
    assert 0.005 < speed.fixed_s < 0.1
    assert run.share("new", last=500) > 0.2
    assert sorted(run.ttft_s[-500:])[250] < 0.5
