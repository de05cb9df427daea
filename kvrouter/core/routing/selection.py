"""Selection, the same steps for every mode: candidates → filters → policy → pick.

    candidates ──filter──filter──> eligible ──policy.order──> [best, next, …]
         │            │
         └────────────┴─ removed: with the name of the filter, only when a decision is explained

`choose` is the hot path and keeps no record. `explain` runs the same steps; as policies change nothing
when asked, both come to the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from msgspec import Struct

from kvrouter.core.routing.admission import AdmissionQueue
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import EQUAL_WITHIN, SECONDS
from kvrouter.core.routing.filters import Filter
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.wire.ids import Target
from kvrouter.errors import BadRequestError


class Verdict(Struct, frozen=True):
    """One target in a decision: the terms it was judged by, or what removed it."""

    target: Target
    candidate: Candidate | None
    """None: the pool refused the target."""
    terms: dict[str, float]
    removed_by: str = ""


class Decision(Struct, frozen=True):
    """An explained decision. `order`: the choice, then the targets to try next; empty if none is eligible."""

    request_id: str
    now: float
    order: tuple[Target, ...]
    verdicts: tuple[Verdict, ...]
    ties: tuple[Target, ...] = ()
    """The choice and the candidates that were equal in the terms that decide; chance chose among them."""
    unseen: float = 0.0
    """See `Moment`, as `part`."""
    part: float = 0.0
    next_best: Target | None = None
    """The target that would be tried next, else the one nearest to the choice in the terms that decide."""
    decisive: tuple[str, ...] = ()
    """The names of the terms that decide."""
    prefill: Decision | None = None
    """Of the worker that computes the prompt, if another one than `target`."""
    remote: Mapping[str, float] = {}
    """Why two workers serve the request, or one: the terms of that choice, if there was one."""

    @property
    def target(self) -> Target | None:
        return self.order[0] if self.order else None

    def why_not(self, other: Verdict) -> str:
        """Why this target was not chosen: what removed it, or how it compares with the choice.

        First the terms that decide, then what they depend on. Empty for the choice itself.
        """
        chosen = next((one for one in self.verdicts if one.target == self.target), None)
        if other is chosen:
            return ""
        if chosen is None or other.candidate is None or other.removed_by or chosen.candidate is None:
            return f"no candidate: {other.removed_by}"
        if other.target in self.ties:
            return f"equal in {' and '.join(self.decisive)}: one of {len(self.ties)}, drawn at random"
        terms = [_against(name, other.terms, chosen.terms) for name in self.decisive]
        return ": ".join(
            filter(None, [", ".join(terms), ", ".join(_differences(other.candidate, chosen.candidate))])
        )


@dataclass(frozen=True)
class Selection:
    """One mode's policy behind the filters.

    A change of settings makes another selection: a kept decision is explained with the one that made it.
    """

    policy: BuiltInPolicy
    filters: tuple[Filter, ...] = ()
    mode: str = ""
    """The name of the mode."""

    @cached_property
    def needs_tokens(self) -> bool:
        """Whether a choice depends on the tokens of earlier requests."""
        return self.policy.needs_tokens or any(one.needs_tokens for one in self.filters)

    @cached_property
    def keeps_sessions(self) -> bool:
        """Whether a session's next request depends on where this one goes."""
        use = self.policy.sessions
        kept = [one for one in self.filters if one.keeps_sessions]
        return use == "read" or any(use or not one.only_if_preferred for one in kept)

    def eligible(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        """The candidates that no filter removes; may be empty."""
        # without a session, as most are, this saves a call
        has_session = request.session or request.parent_session
        for filter_ in self._filters_of(request) if has_session else self._unconditional:
            candidates = filter_.keep(request, candidates, moment)
        return candidates

    def _filters_of(self, request: RouteRequest) -> Sequence[Filter]:
        """Those that apply to the request."""
        if (request.session or request.parent_session) and self.policy.sessions == "preferred":
            return self.filters
        return self._unconditional

    @cached_property
    def _unconditional(self) -> tuple[Filter, ...]:
        return tuple([one for one in self.filters if not one.only_if_preferred])

    def choose(self, request: RouteRequest, eligible: Candidates, moment: Moment) -> list[Candidate]:
        """The pick, then the candidates to try if it fails. `eligible` must not be empty."""
        return [eligible[i] for i in self.policy.order(request, eligible, moment)]

    def must_wait(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        queue: AdmissionQueue,
        *,
        spare: int = 0,
    ) -> bool:
        """Whether the request has to wait until a worker has capacity again.

            every candidate it must go to is full                   → it waits
            `--max-ongoing-requests` removed the last candidate     → it waits: a request will end
            another filter did, or there was none                   → it does not: `route` reports why

        Preferences do not count: a preferred worker that is full must not hold up a request that may
        go elsewhere.
        """
        for filter_ in self.filters:
            if candidates and not filter_.is_preference:
                candidates = filter_.keep(request, candidates, moment)
                if not candidates:
                    return filter_.frees_up
        return queue.is_saturated(candidates, spare=spare)

    def lane(self, request: RouteRequest, moment: Moment) -> str:
        """Names the set of targets that a request may go to: requests of one lane wait for each other."""
        bound = next((to for one in self.filters if (to := one.bound_target(request, moment))), None)
        return f"{request.lora_name or request.served_name} {bound or ''}"

    def explain(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        refusals: dict[Target, str] | None = None,
    ) -> Decision:
        """The whole decision, nothing booked. `refusals`: targets that the pool refused, and why."""
        eligible = self.eligible(request, candidates, moment)
        best = self.choose(request, eligible, moment) if eligible else []
        return self.decision(
            request,
            candidates,
            eligible=eligible,
            order=[one.target for one in best],
            moment=moment,
            refusals=refusals or {},
        )

    def decision(
        self,
        request: RouteRequest,
        candidates: Candidates,
        *,
        eligible: Candidates,
        order: Sequence[Target],
        moment: Moment,
        refusals: dict[Target, str],
    ) -> Decision:
        """A choice with each candidate's terms, and what removed the others."""
        chosen = next((one for one in eligible if order and one.target == order[0]), None)
        terms = self.policy.terms(request, eligible, moment, chosen) if eligible else []
        verdicts = [Verdict(one.target, one, row) for one, row in zip(eligible, terms, strict=True)]
        verdicts += self._removed(request, candidates, eligible, moment)
        verdicts += [Verdict(target, None, {}, reason) for target, reason in refusals.items()]
        judged = next((one for one in verdicts if order and one.target == order[0]), None)
        return Decision(
            request_id=request.request_id,
            now=moment.now,
            order=tuple(order),
            verdicts=tuple(verdicts),
            ties=self.ties(verdicts, order),
            next_best=self._next_best(verdicts, order),
            unseen=moment.unseen,
            part=moment.part,
            decisive=self._decisive(judged) if judged is not None else (),
        )

    def _removed(
        self, request: RouteRequest, candidates: Candidates, eligible: Candidates, moment: Moment
    ) -> list[Verdict]:
        """The candidates that are not eligible, each with the first filter that removes it."""
        if len(eligible) == len(candidates):
            return []
        kept = set(eligible.targets())
        by_target = self.removed(request, candidates, moment)
        # what filters read may have changed since the choice, so that none of them removes this target now
        return [
            Verdict(one.target, one, {}, by_target.get(one.target, "a filter, then"))
            for one in candidates
            if one.target not in kept
        ]

    def removed(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> dict[Target, str]:
        """The targets that filters remove, and the name of the first filter that does."""
        removed: dict[Target, str] = {}
        # the filters again, one by one: `eligible` keeps no record, as every request passes it
        for filter_ in self._filters_of(request):
            before, candidates = candidates, filter_.keep(request, candidates, moment)
            kept = set(candidates.targets())
            removed |= {target: filter_.name for target in before.targets() if target not in kept}
        return removed

    def ties(self, verdicts: Sequence[Verdict], order: Sequence[Target]) -> tuple[Target, ...]:
        """The targets that are as good as the choice in the decisive terms, the choice among them."""
        chosen = next((one for one in verdicts if order and one.target == order[0]), None)
        if chosen is None:
            return ()
        decisive = self._decisive(chosen)
        if not decisive:
            return (chosen.target,)
        judged = [one for one in verdicts if not one.removed_by]
        return tuple(one.target for one in judged if _are_equal(one, chosen, decisive))

    def _next_best(self, verdicts: Sequence[Verdict], order: Sequence[Target]) -> Target | None:
        if len(order) != 1:  # the policy has ranked the others, too
            return order[1] if order else None
        chosen = next((one for one in verdicts if one.target == order[0]), None)
        others = [one for one in verdicts if not one.removed_by and one.target != order[0]]
        if chosen is None or not others:
            return None
        names, terms = self._decisive(chosen), chosen.terms
        # as the choice is the best, the nearest is the next, whether low or high is good
        return min(
            others, key=lambda one: [abs(one.terms.get(name, math.inf) - terms[name]) for name in names]
        ).target

    def _decisive(self, chosen: Verdict) -> tuple[str, ...]:
        """The names of the terms that decide."""
        decisive = self.policy.decisive
        # `kv` without tokens has no cost: then all of its terms decide
        return decisive if decisive and chosen.terms.keys() >= set(decisive) else tuple(chosen.terms)


class Modes:
    """The selections of one router: of its own mode, and of other modes that requests name.

    Each mode counts turns of its own; the filters are the same for all. Bounded: `new_policy` raises
    for a name that is not a mode.
    """

    def __init__(self, default: Selection, new_policy: Callable[[str], BuiltInPolicy] | None = None) -> None:
        self.default = default
        self._new_policy = new_policy
        self._others: dict[str, Selection] = {}

    def of(self, name: str) -> Selection:
        """The selection of a mode; the router's own if `name` is empty. Raises BadRequestError."""
        if not name or name == self.default.mode:
            return self.default
        selection = self._others.get(name)
        if selection is None:
            # kept, not made for each request: a mode that takes turns must remember them
            if self._new_policy is None:
                raise BadRequestError(f"mode {name!r}: this router has one mode only", param="mode")
            selection = self._others[name] = Selection(self._new_policy(name), self.default.filters, name)
        return selection

    def use_filters(self, filters: tuple[Filter, ...]) -> None:
        """Filter by these from the next request on."""
        self.default = replace(self.default, filters=filters)
        # replaced, not made again: their policies have counted turns
        self._others = {name: replace(one, filters=filters) for name, one in self._others.items()}

    def use_policies(
        self, policy: BuiltInPolicy, mode: str, new_policy: Callable[[str], BuiltInPolicy]
    ) -> None:
        """Choose by this policy of this mode from the next request on; other modes begin anew."""
        self.default = replace(self.default, policy=policy, mode=mode)
        self._new_policy, self._others = new_policy, {}


def _are_equal(one: Verdict, other: Verdict, names: Sequence[str]) -> bool:
    return all(_is_equal(one.terms.get(name, math.nan), other.terms[name]) for name in names)


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EQUAL_WITHIN, abs_tol=1e-9)  # a relative one fails near 0


def _against(name: str, other: Mapping[str, float], chosen: Mapping[str, float]) -> str:
    """Both values of a term; of the cost the seconds, if weight `auto` compared these."""
    name, shown = (SECONDS, "seconds") if name == "cost" and SECONDS in chosen else (name, name)
    return f"{shown} {other.get(name, math.nan):.4g} against {chosen[name]:.4g}"


def _differences(one: Candidate, chosen: Candidate) -> Iterator[str]:
    """In words: 3 fewer blocks cached, 2 more requests in flight."""
    for more, what in (
        (one.overlap_blocks - chosen.overlap_blocks, "blocks cached"),
        (one.prefill_tokens - chosen.prefill_tokens, "tokens to prefill"),
        (one.decode_blocks - chosen.decode_blocks, "blocks decoding"),
        (one.requests - chosen.requests, "requests in flight"),
    ):
        if not _is_equal(more, 0.0):
            yield f"{abs(more):.4g} {'more' if more > 0 else 'fewer'} {what}"
