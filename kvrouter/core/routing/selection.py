"""One selection for every mode: candidates → filters → policy → pick.

    candidates ──filter──filter──> eligible ──policy.order──> [best, next, …]
         │            │
         └────────────┴─ removed: who was taken out, and by which filter (only when somebody asks)

`choose` is the hot path and keeps no record. `explain` runs the same steps and tells all; nothing
but a turn, which the policy's state may count, separates what they answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from kvrouter.core.routing.cost import EQUAL_WITHIN
from kvrouter.core.routing.filters import Busy, Filter, Session
from kvrouter.core.routing.policy import Candidate, Policy, PolicyState, RouteRequest
from kvrouter.core.wire.ids import Target


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
    ties: tuple[Target, ...] = ()
    """The choice and those that were as good, in the terms that decide; chance chose."""

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

    @property
    def needs_tokens(self) -> bool:
        """Whether a choice depends on the tokens of the requests before."""
        return self.policy.needs_tokens or any(isinstance(one, Busy) for one in self.filters)

    @property
    def keeps_sessions(self) -> bool:
        """Whether a session's next request depends on where this one goes."""
        return self.policy.needs_sessions or any(isinstance(one, Session) for one in self.filters)

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
        removed = (refusals or {}) | self.removed(request, candidates)
        left = [candidate for candidate in candidates if candidate.target not in removed]
        # turns count in a copy of the state; its tables are shared, and only read
        places = self.policy.order(request, left, replace(self.state)) if left else ()
        order = tuple(left[place].target for place in places)
        terms = self.terms(request, left)
        verdicts = [Verdict(one.target, one, told) for one, told in zip(left, terms, strict=True)]
        known = {one.target: one for one in candidates}
        verdicts += [Verdict(target, known.get(target), {}, why) for target, why in removed.items()]
        ties = self.ties(verdicts, order)
        return Decision(request.request_id, self.state.now, order, tuple(verdicts), ties)

    def removed(self, request: RouteRequest, candidates: Sequence[Candidate]) -> dict[Target, str]:
        """Whom the filters take out, and the name of the first that does."""
        removed: dict[Target, str] = {}
        for filter_ in self.filters:
            before, candidates = candidates, filter_.keep(request, candidates, self.state)
            kept = {candidate.target for candidate in candidates}
            removed |= {one.target: filter_.name for one in before if one.target not in kept}
        return removed

    def terms(self, request: RouteRequest, eligible: Sequence[Candidate]) -> list[dict[str, float]]:
        """What each was judged by. No turn is taken."""
        return self.policy.terms(request, eligible, replace(self.state)) if eligible else []

    def ties(self, verdicts: Sequence[Verdict], order: Sequence[Target]) -> tuple[Target, ...]:
        """Those as good as the choice in the terms that decide; the choice alone if there are none."""
        chosen = next((one for one in verdicts if order and one.target == order[0]), None)
        if chosen is None:
            return ()
        decisive = self.policy.decisive
        if not decisive or not chosen.terms.keys() >= set(decisive):
            decisive = tuple(chosen.terms)
        if not decisive:
            return (chosen.target,)
        judged = [one for one in verdicts if not one.removed_by]
        return tuple(one.target for one in judged if _are_equal(one, chosen, decisive))


def _are_equal(one: Verdict, other: Verdict, names: Sequence[str]) -> bool:
    return all(
        math.isclose(one.terms.get(name, math.nan), other.terms[name], rel_tol=EQUAL_WITHIN, abs_tol=1e-9)
        for name in names
    )
