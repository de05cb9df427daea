"""Mode `sticky`: stay where the prompt is cached, until the wait there is much longer than elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import lowest
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.policies.baseline import fewest_requests

# Tokens per second for a target whose rate has not been measured: about an 8B model on one H100.
DEFAULT_PREFILL_RATE = 20_000.0


@dataclass(frozen=True, slots=True)
class Sticky(BuiltInPolicy):
    """Source: llm-d's "sticky until saturated".

    hit set = targets with overlap / isl >= hit_rate
    TTFT    = prefill tokens charged there / peak prefill rate of the target
    the hit set's best TTFT > the others' best + penalty_s, or no hit set  →  the fewest requests
    otherwise                                                              →  the hit set's best TTFT
    """

    hit_rate: float = 0.8
    penalty_s: float = 1.0

    reads_tables = True

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        enough = self.hit_rate * max(1, request.isl)
        is_hit = [tokens >= enough for tokens in candidates.overlap_tokens()]
        hits = [place for place, hit in enumerate(is_hit) if hit]
        if not hits:
            return lowest(candidates.requests(), moment.random())
        waits = self._ttfts_s(candidates, moment)
        best = min([waits[place] for place in hits])
        best_other = min([wait for wait, hit in zip(waits, is_hit, strict=True) if not hit], default=best)
        if best > best_other + self.penalty_s:
            return lowest(candidates.requests(), moment.random())
        # equal waits, such as 0 on an idle fleet, go by requests: else the first worker would get them all
        at_best = [place for place in hits if waits[place] <= best]
        return fewest_requests(candidates, at_best, moment.random())

    def _ttfts_s(self, candidates: Candidates, moment: Moment) -> list[float]:
        rates = moment.tables.rates.peaks(candidates.targets())
        return [
            tokens / (rate or DEFAULT_PREFILL_RATE)
            for tokens, rate in zip(candidates.charged_tokens(), rates, strict=True)
        ]

    def terms(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        isl = max(1, request.isl)
        return [
            {
                "hit_rate": one.overlap_tokens / isl,
                "ttft_s": wait,
                "requests": one.requests,
            }
            for one, wait in zip(candidates, self._ttfts_s(candidates, moment), strict=True)
        ]
