"""Mode `prefix-affinity`: the target that was sent the longest prefix of the text, while load is balanced."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.wire.ids import Target
from kvrouter.policies.baseline import fewest_requests, power_of_two


@dataclass(frozen=True, slots=True)
class PrefixAffinity(BuiltInPolicy):
    """Source: Ray Serve, PrefixCacheAffinityRouter. It looks at text, not at blocks.

        no text, or max - min requests > imbalanced_threshold  →  power of two choices
        no target has received a text                          →  power of two choices
        matched / len(text) <  match_rate_threshold            →  the targets with the smallest tree
        otherwise                                              →  the targets with the longest match

    Of several such targets the one with the fewest requests wins. Ray's code has had an infinite
    `imbalanced_threshold` since December 2025; its documentation publishes 10.
    """

    imbalanced_threshold: float = 10.0
    match_rate_threshold: float = 0.1

    needs_tokens = False
    needs_text = True
    remembers_text = True
    reads_tables = True

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        # first, as in Ray: a fleet out of balance must not follow the cache any further
        if not request.text or self._is_imbalanced(candidates) or _is_empty(candidates, moment):
            return power_of_two(candidates, moment.random)
        found = self._preferred(request.text, candidates, moment)
        places = [place for place, target in enumerate(candidates.targets()) if target in found]
        return fewest_requests(candidates, places, moment.random())

    def _is_imbalanced(self, candidates: Candidates) -> bool:
        requests = candidates.requests()
        return max(requests) - min(requests) > self.imbalanced_threshold

    def _preferred(self, text: str, candidates: Candidates, moment: Moment) -> set[Target]:
        targets = candidates.targets()
        matched, holders = moment.tables.texts.match(text, targets)
        if matched / len(text) < self.match_rate_threshold:
            # as published, so every miss goes to a worker that has just joined (docs/policies.md)
            return moment.tables.texts.smallest(targets)
        return holders

    def terms(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        """Requests in flight, and each target's own match rate and tree size."""
        length = max(1, len(request.text))
        return [
            {
                "requests": one.requests,
                "match_rate": moment.tables.texts.match(request.text, [one.target])[0] / length,
                "tree_chars": moment.tables.texts.chars(one.target),
            }
            for one in candidates
        ]


def _is_empty(candidates: Candidates, moment: Moment) -> bool:
    """Whether no candidate has received a text: then no tree is the smallest."""
    return not any(map(moment.tables.texts.chars, candidates.targets()))
