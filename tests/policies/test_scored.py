"""Mode scored: each scorer on candidates by hand, their weighted sum, and the order for retries."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.tables.no_hit_lru import NoHitLru
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.policies import scorers
from kvrouter.policies.scored import Scored, Weighted
from kvrouter.policies.scorers import Scorer
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, seeded, target, turns


def scores(scorer: Scorer, *candidates: Candidate, request: RouteRequest = REQUEST) -> list[float]:
    """The scores of the candidates."""
    return scorer(request, columns(candidates), moment())


def queues(*waiting: int | None) -> list[Candidate]:
    """Candidates with these numbers of waiting requests."""
    return [candidate(f"w{place}", waiting=length) for place, length in enumerate(waiting)]


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ((0, 5, 10), [1.0, 0.5, 0.0]),
        ((4, 4), [1.0, 1.0]),
        ((7,), [1.0]),
        ((0, None, 10), [1.0, 0.5, 0.0]),  # the mean of the others
        ((None, None), [1.0, 1.0]),
    ],
)
def test_queue(waiting: tuple[int | None, ...], expected: list[float]) -> None:
    """The score is (max - waiting) / (max - min); equal queues give 1."""
    assert expected == scores(scorers.queue, *queues(*waiting))


def test_kv_cache_utilization() -> None:
    """1 - usage; a candidate without a report counts as the mean."""
    candidates = [candidate("w1", usage=0.25), candidate("w2", usage=0.75), candidate("w3", usage=None)]

    assert [0.75, 0.25, 0.5] == scores(scorers.kv_cache_utilization, *candidates)


@pytest.mark.parametrize(
    ("overlaps", "expected"),
    [
        ((2, 5, 8), [0.0, 0.5, 1.0]),
        ((0, 5, 8), [0.0, 0.0, 1.0]),  # the range leaves out candidates without overlap, as in llm-d
        ((0, 5, 5), [0.0, 1.0, 1.0]),
        ((0, 3), [0.0, 1.0]),
        ((4, 4), [1.0, 1.0]),
        ((0, 0), [0.0, 0.0]),
    ],
)
def test_precise_prefix_cache(overlaps: tuple[int, ...], expected: list[float]) -> None:
    """Min-max over the candidates with any overlap; equal is 1, none is 0."""
    candidates = [candidate(f"w{place}", overlap=overlap) for place, overlap in enumerate(overlaps)]

    assert expected == scores(scorers.precise_prefix_cache, *candidates)


def test_load_aware() -> None:
    """0.5 without a queue, 0 from the threshold on."""
    assert [0.5, 0.25, 0.0, 0.0] == scores(scorers.load_aware(), *queues(0, 64, 128, 500))
    assert [0.25] == scores(scorers.load_aware(10), *queues(5))


def test_active_request() -> None:
    """The score is (max - requests) / max; without requests it is 1."""
    loads = [candidate("w1", requests=0), candidate("w2", requests=1), candidate("w3", requests=4)]

    assert [1.0, 0.75, 0.0] == scores(scorers.active_request, *loads)
    assert [1.0] == scores(scorers.active_request, candidate("w1"))


def test_lora_affinity() -> None:
    """Loaded 1, free place 0.8, waiting 0.6, full 0; a request for the base model scores 1 everywhere."""
    candidates = [
        candidate("w1", lora_names=("a",), max_loras=1),
        candidate("w2", lora_names=("b",), max_loras=2),
        candidate("w3", lora_names=("b",), max_loras=2, waiting_loras=("a",)),
        candidate("w4", lora_names=("b", "c"), max_loras=2),
        candidate("w5", lora_names=("b", "c")),
    ]

    wanted = RouteRequest("req", lora_name="a")
    assert [1.0, 0.8, 0.6, 0.0, 0.8] == scores(scorers.lora_affinity, *candidates, request=wanted)
    assert [1.0] * 5 == scores(scorers.lora_affinity, *candidates)


def test_lora_affinity_by_adapters_in_use() -> None:
    """If the engine reports the adapters in use, these count, not all that it serves."""
    served: dict[str, Any] = {"lora_names": ("a", "b", "c"), "max_loras": 2}
    candidates = [
        candidate("w1", running_loras=("a",), **served),
        candidate("w2", running_loras=("b",), **served),
        candidate("w3", running_loras=("b",), waiting_loras=("a",), **served),
        candidate("w4", running_loras=("b", "c"), **served),
        candidate("w5", running_loras=(), **served),
    ]

    wanted = RouteRequest("req", lora_name="a")
    assert [1.0, 0.8, 0.6, 0.0, 0.8] == scores(scorers.lora_affinity, *candidates, request=wanted)


def test_session_affinity() -> None:
    """1 for the target that the session is bound to, until the binding expires."""
    sessions, candidates = SessionTable(ttl_s=10.0), [candidate("w1"), candidate("w2")]
    sessions.bind("chat", target("w2"), 0.0)

    def score(session: str, now: float) -> list[float]:
        return scorers.session_affinity(
            RouteRequest("req", session=session), columns(candidates), moment(sessions=sessions, now=now)
        )

    assert [0.0, 1.0] == score("chat", 9.0)
    assert [0.0, 0.0] == score("chat", 10.0) == score("other", 1.0) == score("", 1.0)


def test_no_hit_lru() -> None:
    """Never used first, then least recently used; all equal if any target holds the prompt."""
    cold, candidates = NoHitLru(), [candidate(name) for name in ("w1", "w2", "w3", "w4")]
    for name in ("w2", "w4", "w1"):
        cold.used(target(name))

    def score(*what: Candidate) -> list[float]:
        return scorers.no_hit_lru(REQUEST, columns(what), moment(no_hit=cold))

    assert pytest.approx([0.0, 2 / 3, 1.0, 1 / 3]) == score(*candidates)
    assert [0.5, 0.5] == score(candidates[0], candidate("w2", overlap=1))
    assert [1.0] == score(candidates[0])


def test_no_hit_lru_takes_turns_on_cold_prompts() -> None:
    """Four uncached prompts go to four workers."""
    policy = Scored((Weighted("no-hit-lru-scorer", scorers.no_hit_lru),))
    candidates = [candidate(name) for name in ("w1", "w2", "w3", "w4")]

    picks = turns(policy, candidates, 8)

    assert {0, 1, 2, 3} == set(picks[:4])
    assert picks[:4] == picks[4:]


def test_published_weights() -> None:
    """2 x queue + 2 x (1 - usage) + 3 x prefix: 0+1+3, 2+1.5+0, 2+0+1.5."""
    candidates = [
        candidate("w1", waiting=10, usage=0.5, overlap=8),
        candidate("w2", waiting=0, usage=0.25, overlap=2),
        candidate("w3", waiting=0, usage=1.0, overlap=5),
    ]

    rows = Scored().terms(REQUEST, columns(candidates), moment())

    assert pytest.approx([4.0, 3.5, 3.5]) == [row["total"] for row in rows]
    assert {
        "queue-scorer": 0.0,
        "kv-cache-utilization-scorer": 0.5,
        "precise-prefix-cache-scorer": 1.0,
        "total": 4.0,
    } == rows[0]
    assert ["w1"] == picked(Scored(), candidates)


def test_all_busy_and_empty_caches() -> None:
    """Equal load everywhere is a tie."""
    full = [candidate(name, waiting=500, usage=1.0) for name in ("w1", "w2", "w3")]

    picks = Counter(Scored().pick(REQUEST, columns(full), seeded(seed)) for seed in range(90))

    assert 3 == len(picks)


def test_weights_zero_is_chance() -> None:
    """With weights of 0, or without scorers, chance decides."""
    candidates = [candidate("w1", waiting=9), candidate("w2")]
    for weighted in ((Weighted("queue-scorer", scorers.queue, 0.0),), ()):
        picks = {Scored(weighted).pick(REQUEST, columns(candidates), seeded(seed)) for seed in range(40)}

        assert {0, 1} == picks


def test_scores_are_clamped() -> None:
    """A score out of bounds counts as 0 or 1."""
    wild = Weighted("wild", lambda _request, _candidates, _state: [7.0, -3.0, 1.0])

    rows = Scored((wild,)).terms(REQUEST, columns(queues(0, 0, 0)), moment())

    assert [1.0, 0.0, 1.0] == [row["wild"] for row in rows]


def test_further_endpoints_are_the_retry_order() -> None:
    """MaxNumOfEndpoints 3: of five candidates the three best, best first."""
    candidates = queues(30, 0, 20, 10, 40)
    only_queue = (Weighted("queue-scorer", scorers.queue),)

    assert [1, 3, 2] == list(Scored(only_queue, 3).order(REQUEST, columns(candidates), seeded(1)))
    assert [1] == list(Scored(only_queue, 1).order(REQUEST, columns(candidates), seeded(1)))
    assert [1, 3, 2, 0, 4] == list(Scored(only_queue, 99).order(REQUEST, columns(candidates), seeded(1)))
