"""The scorers of mode `scored`: each gives every candidate a number in [0, 1]; higher is better.

Source: llm-d and Moreh's Heimdall, which name them `…-scorer` in an EndpointPickerConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrouter.core.routing.builtin_policy import Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, RouteRequest

Scorer = Callable[[RouteRequest, Candidates, Moment], list[float]]

# Waiting requests from which on load-aware gives 0. Source: llm-d's default.
QUEUE_THRESHOLD = 128

# What no-hit-lru gives every candidate of a prompt that is cached somewhere: equal scores decide nothing.
NEUTRAL = 0.5


def queue(_request: RouteRequest, candidates: Candidates, _moment: Moment) -> list[float]:
    """`(max - waiting) / (max - min)`; all equal: 1."""
    waiting = waiting_requests(candidates)
    return _min_max([-length for length in waiting])


def kv_cache_utilization(_request: RouteRequest, candidates: Candidates, _moment: Moment) -> list[float]:
    """`1 - usage`."""
    return [1 - usage for usage in kv_usages(candidates)]


def precise_prefix_cache(_request: RouteRequest, candidates: Candidates, _moment: Moment) -> list[float]:
    """Overlap, min-max over the candidates with any; all of these equal: 1. No overlap: 0."""
    overlap = candidates.overlap_blocks()
    scores = iter(_min_max([blocks for blocks in overlap if blocks]))
    return [next(scores) if blocks else 0.0 for blocks in overlap]


def load_aware(threshold: int = QUEUE_THRESHOLD) -> Scorer:
    """`0.5 * (1 - waiting / threshold)`, 0 from the threshold on."""

    def score(_request: RouteRequest, candidates: Candidates, _moment: Moment) -> list[float]:
        return [0.5 * (1 - min(waiting, threshold) / threshold) for waiting in waiting_requests(candidates)]

    return score


def active_request(_request: RouteRequest, candidates: Candidates, _moment: Moment) -> list[float]:
    """`(max - requests) / max` of the requests in flight, booked by any replica; none in flight: 1."""
    requests = candidates.requests()
    most = max(requests) or 1
    return [(most - count) / most for count in requests]


def lora_affinity(request: RouteRequest, candidates: Candidates, _moment: Moment) -> list[float]:
    """The adapter is loaded: 1; a place is free: 0.8; requests wait for it there: 0.6; no place: 0."""
    return [_lora_score(request.lora_name, candidate) for candidate in candidates]


def session_affinity(request: RouteRequest, candidates: Candidates, moment: Moment) -> list[float]:
    """1 for the target that the session is bound to, 0 for the others."""
    bound = moment.tables.sessions.target_of(request.session, moment.now) if request.session else None
    return [float(target == bound) for target in candidates.targets()]


def no_hit_lru(_request: RouteRequest, candidates: Candidates, moment: Moment) -> list[float]:
    """For a prompt that is cached nowhere: from 1 for the least recently used target down to 0.

    Used means that the target got an uncached prompt. Targets never used share the first place (llm-d takes
    them in the order of their names). For a prompt that is cached somewhere: NEUTRAL for all.
    """
    if any(candidates.overlap_blocks()):
        return [NEUTRAL] * len(candidates)
    ranks = moment.tables.no_hit.ranks(candidates.targets())
    last = max(1, len(candidates) - 1)
    return [1 - rank / last for rank in ranks]


def waiting_requests(candidates: Candidates) -> list[float]:
    """Requests in each engine's queue, as reported; without a report, the mean of the others."""
    return _mean_where_unknown([beat.waiting for beat in candidates.beats()])


def kv_usages(candidates: Candidates) -> list[float]:
    """The fraction 0..1 of each engine's KV blocks that requests hold; without a report, the mean."""
    return _mean_where_unknown([beat.kv_usage for beat in candidates.beats()])


def _mean_where_unknown(reports: Sequence[float | None]) -> list[float]:
    # not 0: an engine that does not report would look idle and get every request
    known = [report for report in reports if report is not None]
    mean = sum(known) / len(known) if known else 0.0
    return [mean if report is None else report for report in reports]


def _min_max(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    least, most = min(values), max(values)
    if most == least:
        return [1.0] * len(values)
    return [(value - least) / (most - least) for value in values]


def _lora_score(lora_name: str | None, candidate: Candidate) -> float:
    if lora_name is None or lora_name in candidate.loaded_loras:
        return 1.0
    taken = len(candidate.loaded_loras) + len(candidate.waiting_loras)
    if not candidate.card.max_loras or taken < candidate.card.max_loras:
        return 0.8  # an unknown number of places counts as free
    return 0.6 if lora_name in candidate.waiting_loras else 0.0
