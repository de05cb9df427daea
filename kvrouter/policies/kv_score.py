"""Mode `kv-score`: the highest `2 * overlap_ratio - kv_usage - waiting / max waiting`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core.routing.cost import lowest, sample_scores
from kvrouter.core.routing.policy import Candidate, Policy, PolicyState, RouteRequest
from kvrouter.policies import reports

OVERLAP_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class KvScore(Policy):
    """Dynamo's earlier router, which maximises. Source: NVIDIA Dynamo, "KV router performance tuning".

    Load is what engines report of themselves, so it lags behind: several requests in one reporting
    interval see the same figures.
    """

    gpu_cache_usage_weight: float = 1.0
    waiting_requests_weight: float = 1.0

    decisive = ("score",)

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """Temperature 0: the highest score, at random among the equal. Above: softmax over the raw scores."""
        scores = [row["score"] for row in self.terms(request, candidates, state)]
        temperature = state.temperature if request.temperature is None else request.temperature
        if temperature > 0:
            return sample_scores(scores, temperature, state.random())
        return lowest([-score for score in scores], state.random())

    def terms(
        self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> list[dict[str, float]]:
        """The published terms, weights not yet applied, and the score."""
        weight = _weight(request, state)
        isl = max(1, request.isl)
        waiting = reports.waiting(candidates)
        longest = max(waiting) or 1.0
        rows = zip(candidates, reports.kv_usage(candidates), waiting, strict=True)
        return [
            self._terms(weight, one.overlap_tokens / isl, usage, queue / longest)
            for one, usage, queue in rows
        ]

    def _terms(self, weight: float, ratio: float, usage: float, waiting: float) -> dict[str, float]:
        score = weight * ratio - self.gpu_cache_usage_weight * usage - self.waiting_requests_weight * waiting
        return {
            "overlap_ratio": ratio,
            "gpu_cache_usage": usage,
            "normalized_waiting": waiting,
            "score": score,
        }


def _weight(request: RouteRequest, state: PolicyState) -> float:
    if request.overlap_weight is not None:
        return request.overlap_weight
    return OVERLAP_WEIGHT if state.overlap_weight is None else state.overlap_weight
