"""Mode `prefix-affinity`: where the longest prefix of the text was sent before, while load is balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core.routing.candidates import requests_of, targets_of
from kvrouter.core.routing.policy import Candidate, Policy, PolicyState, RouteRequest
from kvrouter.core.wire.ids import Target
from kvrouter.policies.load import fewest_requests, power_of_two


@dataclass(frozen=True, slots=True)
class PrefixAffinity(Policy):
    """Source: Ray Serve, PrefixCacheAffinityRouter. It looks at text, not at blocks.

        no text, or max - min requests > imbalanced_threshold  →  power of two choices
        matched / len(text) <  match_rate_threshold            →  the targets with the smallest tree
        otherwise                                              →  the targets with the longest match

    Within the targets so found the fewest requests win. An infinite `imbalanced_threshold` is Ray's
    code since December 2025; 10 is its published document.
    """

    imbalanced_threshold: float = 10.0
    match_rate_threshold: float = 0.1

    needs_tokens = False
    needs_text = True
    remembers_text = True
    reads_tables = True

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """See the class."""
        if not request.text or self._is_imbalanced(candidates):
            return power_of_two(candidates, state.random)
        found = self._preferred(request.text, candidates, state)
        places = [place for place, target in enumerate(targets_of(candidates)) if target in found]
        return fewest_requests(candidates, places, state.random())

    def _is_imbalanced(self, candidates: Sequence[Candidate]) -> bool:
        requests = requests_of(candidates)
        return max(requests) - min(requests) > self.imbalanced_threshold

    def _preferred(self, text: str, candidates: Sequence[Candidate], state: PolicyState) -> set[Target]:
        targets = targets_of(candidates)
        matched, holders = state.texts.match(text, targets)
        if matched / len(text) < self.match_rate_threshold:
            return state.texts.smallest(targets)
        return holders

    def terms(
        self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> list[dict[str, float]]:
        """Requests, each candidate's own match rate, and the size of its tree."""
        length = max(1, len(request.text))
        return [
            {
                "requests": one.requests,
                "match_rate": state.texts.match(request.text, [one.target])[0] / length,
                "tree_chars": state.texts.chars(one.target),
            }
            for one in candidates
        ]
