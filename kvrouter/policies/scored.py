"""Mode `scored`: the sum of weighted scores, as llm-d's and Heimdall's endpoint picker adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.policies import scorers
from kvrouter.policies.scorers import Scorer

_DIGITS = 9
"""Totals that agree so far are ties."""


class Weighted(NamedTuple):
    """One scorer of a profile. `name` is what an EndpointPickerConfig calls it."""

    name: str
    scorer: Scorer
    weight: float = 1.0


HEIMDALL = (
    Weighted("queue-scorer", scorers.queue, 2),
    Weighted("kv-cache-utilization-scorer", scorers.kv_cache_utilization, 2),
    Weighted("precise-prefix-cache-scorer", scorers.precise_prefix_cache, 3),
)
"""The weights of Heimdall's published example."""


@dataclass(frozen=True, slots=True)
class Scored(BuiltInPolicy):
    """The best `max_endpoints`, best first, ties at random; the further ones are tried if it fails."""

    scorers: tuple[Weighted, ...] = HEIMDALL
    max_endpoints: int = 1

    decisive = ("total",)

    @property
    def needs_sessions(self) -> bool:  # type: ignore[override]
        """Whether one of the scorers asks for the session's target."""
        return any(one.scorer is scorers.session_affinity for one in self.scorers)

    @property
    def reads_tables(self) -> bool:  # type: ignore[override]
        """Whether one of the scorers looks beyond the candidates."""
        return self.needs_sessions or any(one.scorer is scorers.no_hit_lru for one in self.scorers)

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        """The highest total."""
        return self.order(request, candidates, moment)[0]

    def order(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Sequence[int]:
        """The highest totals, best first."""
        totals = [0.0] * len(candidates)
        for _, scorer, weight in self.scorers:
            scores = scorer(request, candidates, moment)
            totals = [total + weight * clamped(score) for total, score in zip(totals, scores, strict=True)]
        ranked = [(-round(total, _DIGITS), moment.random(), place) for place, total in enumerate(totals)]
        if self.max_endpoints == 1:
            return (min(ranked)[2],)
        return [place for _, _, place in sorted(ranked)[: self.max_endpoints]]

    def routed(self, request: RouteRequest, choice: Candidate, moment: Moment) -> None:
        """Cold prompts are counted, for no-hit-lru."""
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
    """A score within [0, 1], whatever the scorer says."""
    return min(1.0, max(0.0, score))
