"""Mode `kv-score`: the highest `2 * overlap_ratio - kv_usage - waiting / max waiting`."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import lowest, sample_scores
from kvrouter.core.routing.policy import AUTO, Candidate, RouteRequest
from kvrouter.policies.scorers import kv_usages, waiting_requests

OVERLAP_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class KvScore(BuiltInPolicy):
    """Dynamo's earlier router, which maximises. Source: NVIDIA Dynamo, "KV router performance tuning".

    Load is what engines report of themselves, so it lags behind: several requests in one reporting
    interval see the same figures. `temperature` 0: the highest score, at random among the equal;
    above: softmax over the raw scores.
    """

    gpu_cache_usage_weight: float = 1.0
    waiting_requests_weight: float = 1.0
    overlap_weight: float = OVERLAP_WEIGHT
    temperature: float = 0.0

    decisive = ("score",)

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        scores = [row["score"] for row in self.terms(request, candidates, moment)]
        temperature = self.temperature if request.temperature is None else request.temperature
        if temperature > 0:
            return sample_scores(scores, temperature, moment.random())
        return lowest([-score for score in scores], moment.random())

    def terms(
        self,
        request: RouteRequest,
        candidates: Candidates,
        _moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        """The published terms, weights not yet applied, and the score."""
        given = request.overlap_weight
        weight = self.overlap_weight if given is None or given == AUTO else given  # `auto` compares seconds
        isl = max(1, request.isl)
        waiting = waiting_requests(candidates)
        longest = max(waiting) or 1.0  # no queue anywhere: the term is 0, not 0 / 0
        rows = zip(candidates.overlap_tokens(), kv_usages(candidates), waiting, strict=True)
        return [self._terms(weight, tokens / isl, usage, queue / longest) for tokens, usage, queue in rows]

    def _terms(self, weight: float, ratio: float, usage: float, waiting: float) -> dict[str, float]:
        score = weight * ratio - self.gpu_cache_usage_weight * usage - self.waiting_requests_weight * waiting
        return {
            "overlap_ratio": ratio,
            "gpu_cache_usage": usage,
            "normalized_waiting": waiting,
            "score": score,
        }
