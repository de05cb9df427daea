"""Cells: loads, caches, the oracle, seeds, and modes next to each other."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.lab.simulate import generated, workloads
from kvrouter.lab.simulate.agenda import Agenda
from kvrouter.lab.simulate.cells import ORACLE, Cell
from kvrouter.lab.simulate.compare import compare
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import SimulatedFleet
from kvrouter.lab.simulate.measures import Measures
from kvrouter.lab.simulate.placement import Frontend, Oracle, SimulatedReplicas, Sync
from kvrouter.lab.simulate.step_model import REFERENCE, SHORTEST
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from kvrouter.policies import PolicySettings, new_policy

TRACE = workloads.trace(read_trace(CONVERSATION_EXCERPT, 600))
SAME_SIDE = 2  # a seed with which two ties fall on the same side
CELL = Cell(TRACE, 0.5, load=0.7, workers=4)
DEFAULTS = PolicySettings()


def measured(cell: Cell, mode: str) -> Measures:
    """One seed."""
    return cell.measure(mode, DEFAULTS, 0)


def test_modes_can_be_told_apart() -> None:
    """Under load kv with weight 8 is near the oracle, with weight 1 far, least-loaded farther."""
    cell = replace(CELL, load=0.6)
    found = [measured(cell, mode).ttft_p90_s for mode in (ORACLE, "kv:8", "kv:1", "least-loaded")]

    assert found[1] < 1.1 * found[0]
    assert 1.2 * max(found[:2]) < found[2] < found[3] / 1.2


def test_load_is_a_share_of_saturation() -> None:
    """Beyond 0.8 queues grow: the oracle's times rise with the length of the run. Below they do not."""
    half = replace(CELL, workload=workloads.trace(read_trace(CONVERSATION_EXCERPT, 300)))

    assert pytest.approx(0.7 * CELL.saturation) == CELL.offered_pace
    below = [measured(replace(cell, load=0.5), ORACLE).ttft_p90_s for cell in (half, CELL)]
    beyond = [measured(replace(cell, load=1.6), ORACLE).ttft_p90_s for cell in (half, CELL)]
    assert below[1] < 1.3 * below[0]
    assert beyond[1] > 1.5 * beyond[0] > 3 * below[0]


def test_saturation_does_not_depend_on_what_is_compared() -> None:
    """Cells with other replicas, orders or clients are offered the same."""
    other = replace(CELL, replicas=4, sync=None, leaving=0.3, model=REFERENCE.served(SHORTEST, 2))

    assert CELL.saturation == other.saturation


def test_cache() -> None:
    """More cache, more cached tokens, up to what one endless cache has."""
    small, large = (measured(replace(CELL, cache=cache, load=0.5), ORACLE) for cache in (0.1, 4.0))

    assert small.cached < large.cached <= large.achievable == small.achievable


def test_cell_has_room_for_its_largest_request() -> None:
    """However small the cache."""
    assert workloads.largest_blocks(TRACE.draw(0)) == replace(CELL, cache=0.001).capacity_blocks


def test_speeds() -> None:
    """A slow engine gets fewer prompt tokens, as its queue takes longer."""
    run = replace(CELL, speeds=(1.0, 0.25)).run(ORACLE, DEFAULTS, 0)

    tokens: Counter[str] = Counter()
    for target, arrival in zip(run.targets, run.arrivals, strict=True):
        tokens[target.worker_id] += arrival.prompt_tokens
    assert tokens["w2"] + tokens["w4"] < 0.5 * (tokens["w1"] + tokens["w3"])


def test_clients_that_leave() -> None:
    """They count in no figure, and their places are free for others."""
    cell = replace(CELL, leaving=0.3)
    run, figures = cell.run("kv", DEFAULTS, 0), measured(cell, "kv")

    assert 0.7 < figures.completed < 0.95
    assert len(run.completed) == len(run.ttft_s) == round(figures.completed * len(run.targets))
    assert figures.ttft_p90_s < measured(CELL, "kv").ttft_p90_s


def test_late_kv_events() -> None:
    """What an engine has stored is found when its event has come: here, after the next request."""
    asked = [Arrival(number * 3.0, [1, 2], 1500, 1) for number in range(8)]

    def cached(delay_s: float) -> int:
        policies = [new_policy("kv", replace(DEFAULTS, overlap_weight=8.0))]
        fleet = SimulatedFleet(
            lambda agenda: SimulatedReplicas(agenda, policies, random.Random(1), kv_delay_s=delay_s),
            REFERENCE,
            100,
            [1.0] * 4,
        )
        return fleet.run(asked).cached_tokens

    assert 7 * 1024 == cached(0.0) == cached(2.0) > cached(20.0)


def test_warm_up_is_not_measured() -> None:
    """Only requests after it count."""
    run = Cell(generated.short_groups(), 2.0, workers=8).run("round-robin", DEFAULTS, 0)
    warm_up = generated.short_groups().warm_up

    assert len(run.targets) - warm_up == len(run.after(warm_up).ttft_s)


def test_seeds_and_processes() -> None:
    """Runs in two processes give the rows of one; the oracle is the first row and has no regret."""
    alone = compare([CELL], ["least-loaded"], DEFAULTS, seeds=2)
    (together,) = compare([CELL], ["least-loaded"], DEFAULTS, seeds=2, jobs=2)

    assert [row.mean for row in alone[0].rows] == [row.mean for row in together.rows]
    assert [ORACLE, "least-loaded"] == [row.mode for row in together.rows]
    assert 0.0 == together.rows[0].regret < together.rows[1].regret
    assert together.rows[0].spread.ttft_p90_s > 0


# --- replicas ---


def twins(sync: Sync | None, gap_s: float) -> dict[WorkerId, int]:
    """Two requests without shared blocks through two replicas: how many each worker got."""
    agenda_of: list[Agenda] = []

    def placer(agenda: Agenda) -> SimulatedReplicas:
        agenda_of.append(agenda)
        made = SimulatedReplicas(
            agenda, [new_policy("kv", DEFAULTS) for _ in range(2)], random.Random(SAME_SIDE), sync
        )
        made._entrance = Alternating()  # type: ignore[assignment]  # one through each
        return made

    arrivals = [Arrival(number * gap_s, [number], 600, 5) for number in range(2)]
    run = SimulatedFleet(placer, REFERENCE, 100, [1.0, 1.0]).run(arrivals)
    return {worker: sum(target.worker_id == worker for target in run.targets) for worker in run.deepest}


class Alternating:
    """Chooses every item in turn."""

    def __init__(self) -> None:
        self.turn = 0

    def choice(self, items: Any) -> Any:
        self.turn += 1
        return items[self.turn % len(items)]


def test_bookings_reach_the_other_replica() -> None:
    """After the delay a replica avoids the worker that the other one chose."""
    assert {1} == set(twins(Sync(delay_s=0.005), gap_s=0.010).values())


def test_bookings_are_unseen_before() -> None:
    """Before the delay, after a loss, or without sync it may choose the same worker."""
    alone = twins(None, gap_s=0.010)

    assert alone == twins(Sync(delay_s=0.020), gap_s=0.010) == twins(Sync(0.005, loss=1.0), gap_s=0.010)
    assert {0, 2} == set(alone.values())


def test_oracle_breaks_ties_by_chance() -> None:
    """Idle engines are equal."""
    chances = iter([0.0, 0.99])
    oracle = Oracle(lambda: next(chances))
    fleet = SimulatedFleet(lambda _agenda: oracle, REFERENCE, 100, [1.0, 1.0])

    run = fleet.run([Arrival(0.0, [1], 600, 1), Arrival(9.0, [2], 600, 1)])

    assert [Target(WorkerId("w1")), Target(WorkerId("w2"))] == run.targets


def test_engines_fail_and_join() -> None:
    """What a failed engine has begun is lost, what waits there goes elsewhere; a new one takes its share."""
    cell = replace(CELL, fails=(("w2", 30.0),), joins=(40.0,))
    for mode in (ORACLE, "kv", "round-robin"):
        run = cell.run(mode, DEFAULTS, 0)
        at = [run.sent_s[number] for number, target in enumerate(run.targets) if target.worker_id == "w2"]

        assert set(run.deepest) == {"w1", "w2", "w3", "w4", "w5"}
        assert max(at) < 30.0 < max(run.sent_s)
        assert run.share("w5") > 0.1
        assert 0 < len(run.targets) - len(run.completed) < 40


def test_without_kv_events() -> None:
    """Prompts are taken for cached where they were sent: more than by load alone is cached."""
    cell = replace(CELL, frontend=Frontend(use_kv_events=False))

    assert measured(cell, "kv").cached > 1.5 * measured(cell, "least-loaded").cached


def test_queue_and_sessions() -> None:
    """Requests wait while all engines have much to prefill, none in vain; a session stays on its engine."""
    cell = replace(CELL, load=1.2)
    waits = replace(cell, frontend=Frontend(queue_threshold=1.0))
    run = waits.run("least-loaded", DEFAULTS, 0)

    assert len(run.completed) == len(run.targets)
    assert run.targets != cell.run("least-loaded", DEFAULTS, 0).targets
    chats = Cell(generated.named("multi-turn:sessions=20", ()), 1.0, workers=4)
    bound = replace(chats, frontend=Frontend(session_affinity="soft")).run("random", DEFAULTS, 0)
    placed: dict[str, set[Target]] = {}
    for arrival, target in zip(bound.arrivals, bound.targets, strict=True):
        placed.setdefault(arrival.session, set()).add(target)
    assert {1} == {len(targets) for targets in placed.values()}
