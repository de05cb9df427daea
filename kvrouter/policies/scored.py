"""Mode `scored`: the sum of weighted scores, as llm-d's and Heimdall's endpoint picker adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.policies import scorers
from kvrouter.policies.scorers import Scorer

# Digits that are compared: sums in another order round differently, and equal candidates must stay a tie.
_DIGITS = 9


class Weighted(NamedTuple):
    """One scorer of a profile. `name`: the one in the EndpointPickerConfig."""

    name: str
    scorer: Scorer
    weight: float = 1.0


# The weights of Heimdall's published example.
HEIMDALL = (
    Weighted("queue-scorer", scorers.queue, 2),
    Weighted("kv-cache-utilization-scorer", scorers.kv_cache_utilization, 2),
    Weighted("precise-prefix-cache-scorer", scorers.precise_prefix_cache, 3),
)


@dataclass(frozen=True, slots=True)
class Scored(BuiltInPolicy):
    """The best `max_endpoints`, ties at random; a retry takes the next best."""

    scorers: tuple[Weighted, ...] = HEIMDALL
    max_endpoints: int = 1

    decisive = ("total",)

    @property
    def sessions(self) -> Literal["", "read"]:  # type: ignore[override]
        return "read" if any(one.scorer is scorers.session_affinity for one in self.scorers) else ""

    @property
    def reads_tables(self) -> bool:  # type: ignore[override]
        return bool(self.sessions) or any(one.scorer is scorers.no_hit_lru for one in self.scorers)

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return self.order(request, candidates, moment)[0]

    def order(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Sequence[int]:
        totals = [0.0] * len(candidates)
        for _, scorer, weight in self.scorers:
            scores = scorer(request, candidates, moment)
            totals = [total + weight * clamped(score) for total, score in zip(totals, scores, strict=True)]
        ranked = [(-round(total, _DIGITS), moment.random(), place) for place, total in enumerate(totals)]
        if self.max_endpoints == 1:  # the default: no need to sort a thousand
            return (min(ranked)[2],)
        return [place for _, _, place in sorted(ranked)[: self.max_endpoints]]

    def routed(self, request: RouteRequest, choice: Candidate, moment: Moment) -> None:
        """Record a prompt without overlap, for no-hit-lru."""
        if not choice.overlap_blocks:
            moment.tables.no_hit.used(choice.target)

    def terms(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        """Every score before its weight, and the total."""
        rows: list[dict[str, float]] = [{} for _ in candidates]
        totals = [0.0] * len(candidates)
        for name, scorer, weight in self.scorers:
            for place, score in enumerate(scorer(request, candidates, moment)):
                rows[place][name] = clamped(score)
                totals[place] += weight * clamped(score)
        return [row | {"total": total} for row, total in zip(rows, totals, strict=True)]


def clamped(score: float) -> float:
    """The score, limited to [0, 1] as scorers should return it."""
    return min(1.0, max(0.0, score))
