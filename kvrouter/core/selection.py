"""One selection for every mode: candidates → filters → policy → pick.

    candidates ──filter──filter──> eligible ──policy.order──> [best, next, …]
         │            │
         └────────────┴─ removed: who was taken out, and by which filter (only when somebody asks)

`choose` is the hot path and keeps no record. `explain` runs the same steps and tells all; nothing
but a turn, which the policy's state may count, separates what they answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from kvrouter.core.filters import Filter
from kvrouter.core.ids import Target
from kvrouter.core.policy import Candidate, Policy, PolicyState, RouteRequest


class Verdict(Struct, frozen=True):
    """One target in a decision: what it was judged by, or what took it out."""

    target: Target
    candidate: Candidate | None
    """None: the pool did not offer it."""
    terms: dict[str, float]
    removed_by: str = ""


class Decision(Struct, frozen=True):
    """A decision explained. `order`: the choice first, then those to try next; empty if nobody is left."""

    request_id: str
    now: float
    order: tuple[Target, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def target(self) -> Target | None:
        """The choice."""
        return self.order[0] if self.order else None


@dataclass(slots=True)
class Selection:
    """A policy with its state, behind its filters. Both may be replaced while it runs."""

    policy: Policy
    state: PolicyState
    filters: tuple[Filter, ...] = ()

    def eligible(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those that no filter takes out; empty if none is left."""
        for filter_ in self.filters:
            candidates = filter_.keep(request, candidates, self.state)
        return candidates

    def choose(self, request: RouteRequest, eligible: Sequence[Candidate]) -> list[Candidate]:
        """The pick, then those to try if it fails. There must be at least one."""
        return [eligible[i] for i in self.policy.order(request, eligible, self.state)]

    def explain(
        self,
        request: RouteRequest,
        candidates: Sequence[Candidate],
        refusals: dict[Target, str] | None = None,
    ) -> Decision:
        """The whole decision, without its consequences: no turn is taken, nothing is booked.

        `refusals`: targets that the pool did not offer, and why.
        """
        removed = dict(refusals or {})
        left = candidates
        for filter_ in self.filters:
            before, left = left, filter_.keep(request, left, self.state)
            kept = {candidate.target for candidate in left}
            removed |= {one.target: filter_.name for one in before if one.target not in kept}
        # turns count in copies of the state; its tables are shared, and only read
        terms = self.policy.terms(request, left, replace(self.state)) if left else []
        places = self.policy.order(request, left, replace(self.state)) if left else ()
        order = [left[place].target for place in places]
        verdicts = [Verdict(one.target, one, told) for one, told in zip(left, terms, strict=True)]
        known = {one.target: one for one in candidates}
        verdicts += [Verdict(target, known.get(target), {}, why) for target, why in removed.items()]
        return Decision(request.request_id, self.state.now, tuple(order), tuple(verdicts))
