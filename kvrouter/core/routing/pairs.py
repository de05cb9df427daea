"""Prefill and decode apart: which two workers serve a request together, and whether two are better than one.

    remote_s = wait_P + own_P * (1 + gamma_P) + transfer of what D lacks
    local_s  = wait + own + MU * decoding * prefill          of the whole workers where it is least
    P: the least of its three terms        D: the fewest active blocks - overlap, of those with room

MU is what a second of a decoding sequence's stall is worth in seconds of a first token: .2 was good for two
workloads at two ratios of workers; with .02 so much stays that decoding is as slow as in whole engines, with
1 nearly all is handed over. Where seconds cannot be predicted, or the weight is a number w, P is the least
`w * prefill_blocks`, D the least `decode_blocks`, and a prompt stays if the best worker lacks few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import ClassVar, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import InBlocks, InSeconds, lowest, terms_in_seconds
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.routing.selection import Decision, Selection
from kvrouter.core.wire.ids import Target

MU = 0.2
# With fewer uncached tokens a prompt stays at its decode worker, where seconds are not compared: the
# threshold of vllm-router is 256, those of llm-d's examples 8 and 512, Dynamo's 2,048.
FEW_TOKENS = 512


@dataclass(slots=True)
class _Half(BuiltInPolicy):
    """Chooses one of the two by a part of the costs of `policy`, with all that is added to these."""

    policy: BuiltInPolicy

    decisive = ("cost",)
    shown: ClassVar[tuple[str, ...]] = ("prefill_blocks",)
    """The columns that the cost is made of, in blocks."""

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return lowest(self.costs(request, candidates, moment).each, moment.random())

    def terms(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        costs = self.costs(request, candidates, moment)
        if isinstance(costs, InSeconds):
            rows = terms_in_seconds(candidates, costs)
        else:
            weight = {"overlap_weight": costs.overlap_weight} if costs.overlap_weight else {}
            rows = [
                weight | {name: getattr(one, name) for name in self.shown} | {"cost": cost}
                for one, cost in zip(candidates, costs.each, strict=True)
            ]
        costs.show_added(rows)
        return rows


@dataclass(slots=True)
class PrefillHalf(_Half):
    """Chooses the worker that computes the prompt. With a number as the weight what it decodes is ignored."""

    def costs(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> InBlocks | InSeconds:
        costs = self.policy.costs(request, candidates, moment)
        if isinstance(costs, InSeconds):
            return costs
        rows = zip(candidates, costs.added_blocks(), strict=True)
        return replace(costs, each=[costs.overlap_weight * one.prefill_blocks + added for one, added in rows])


@dataclass(slots=True)
class DecodeHalf(_Half):
    """Chooses the worker that generates the answer: the fewest blocks that it would hold beyond its own.

    Blocks that it has already are not handed over. With a number as the weight they do not count: that is
    the published formula without its prefill.
    """

    shown: ClassVar[tuple[str, ...]] = ("decode_blocks", "overlap_blocks")

    def costs(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> InBlocks:
        """Those without room for the prompt come last."""
        whole = self.policy.costs(request, candidates, moment)
        counts_overlap = isinstance(whole, InSeconds)
        # a tier with 0 has an unknown size: then nothing is known of the room
        rooms = [sum(one.card.tiers.values()) if all(one.card.tiers.values()) else 0 for one in candidates]
        most = max(one.decode_blocks for one in candidates)
        each = [
            one.decode_blocks
            - counts_overlap * one.overlap_blocks
            + added
            + (most if 0 < room < one.decode_blocks else 0)
            for one, added, room in zip(candidates, whole.added_blocks(), rooms, strict=True)
        ]
        return InBlocks(each, 1.0, whole.added, 0.0)


class Pair(Struct, frozen=True, gc=False):
    """Two workers for one request: the first computes its prompt, the second generates the answer."""

    computes: Candidate
    answers: Candidate
    prefill: Selection
    decode: Selection
    prefillers: Candidates
    decoders: Candidates

    def explain(
        self, request: RouteRequest, whole: Candidates, moment: Moment, refusals: dict[Target, str]
    ) -> Decision:
        """The whole decision: that of the decode worker, with the prefill worker's within."""

        def explained(
            selection: Selection, chosen: Candidate, eligible: Candidates, refusals: dict[Target, str]
        ) -> Decision:
            return selection.decision(
                request, eligible, eligible=eligible, order=[chosen.target], moment=moment, refusals=refusals
            )

        shown = {*self.decoders.targets(), *self.prefillers.targets()}
        others = {target: "no half of this pair" for target in whole.targets() if target not in shown}
        refusals = {target: why for target, why in refusals.items() if target not in shown} | others
        decision = explained(self.decode, self.answers, self.decoders, refusals)
        first = explained(self.prefill, self.computes, self.prefillers, {})
        return replace(decision, prefill=first)


class Sharing(Struct, frozen=True, gc=False):
    """Whether two workers serve a request together."""

    pair: Pair | None = None
    """None: one worker serves it alone."""
    terms: Mapping[str, float] = {}
    """Why; empty if no two were left to compare with one."""


def choose_pair(
    request: RouteRequest,
    selection: Selection,
    islands: Sequence[tuple[Candidates, Candidates]],
    whole: Candidates,
    moment: Moment,
    *,
    least_tokens: int | None,
    computed_at: Target | None = None,
) -> Sharing:
    """The two workers, if they serve the request better than one of `whole` alone.

    `islands`: prefill and decode workers that can hand over to each other. `least_tokens`: the operator's
    threshold in place of the rule. `computed_at`: the prompt is computed there already, so only the other
    one is chosen.
    """
    policy = selection.policy
    first_half, second_half = PrefillHalf(policy), DecodeHalf(policy)
    prefill = replace_fields(selection, policy=first_half)
    decode = replace_fields(selection, policy=second_half)
    best: _Island | None = None
    for all_prefillers, all_decoders in islands:
        decoders = decode.eligible(request, all_decoders, moment)
        prefillers = _not_resting(prefill.eligible(request, all_prefillers, moment), decoders, moment)
        if computed_at is not None:
            prefillers = prefillers.kept([one == computed_at for one in prefillers.targets()])
        if not (prefillers and decoders):
            continue
        costs = first_half.costs(request, prefillers, moment)
        place = lowest(costs.each, moment.random())
        decoders = _not_resting_after(prefillers[place], decoders, moment)
        if not decoders:
            continue
        held = second_half.costs(request, decoders, moment)
        at = lowest(held.each, moment.random())
        cost = costs.each[place] + costs.block * held.added_blocks()[at]
        both = costs.each[place] + costs.block * held.each[at]
        if best is None or both < best.both:
            best = _Island(both, cost, prefillers[place], decoders[at], prefillers, decoders)
    if best is None:
        return Sharing()
    terms = _compared(
        request, policy, moment, whole, best.answers, prefill_cost=best.cost, least_tokens=least_tokens
    )
    is_remote = terms.pop("is_remote") or computed_at is not None  # what is computed is not computed twice
    two = best.computes, best.answers, prefill, decode, best.prefillers, best.decoders
    return Sharing(Pair(*two) if is_remote else None, terms)


class _Island(NamedTuple):
    """The best pair of workers that can hand over to each other."""

    both: float
    """The costs of both halves, in the unit of the first: islands are compared by it."""
    cost: float
    """That of the first half, and what was added to that of the second."""
    computes: Candidate
    answers: Candidate
    prefillers: Candidates
    decoders: Candidates


def _not_resting_after(computes: Candidate, decoders: Candidates, moment: Moment) -> Candidates:
    """Those that this prefill worker can hand over to."""
    rests, first = moment.tables.transfers.rests, computes.target.worker_id
    return decoders.kept([not rests(first, one.worker_id, moment.now) for one in decoders.targets()])


def _not_resting(prefillers: Candidates, decoders: Candidates, moment: Moment) -> Candidates:
    """Those that can hand over to one of the decode workers: the others have failed with each just now."""
    transfers, names = moment.tables.transfers, {target.worker_id for target in decoders.targets()}
    if not transfers.has_failures:  # the usual case: no pair is looked up
        return prefillers
    return prefillers.kept(
        [
            not all(transfers.rests(target.worker_id, name, moment.now) for name in names)
            for target in prefillers.targets()
        ]
    )


def _compared(
    request: RouteRequest,
    policy: BuiltInPolicy,
    moment: Moment,
    whole: Candidates,
    decode: Candidate,
    *,
    prefill_cost: float,
    least_tokens: int | None,
) -> dict[str, float]:
    """The terms of the choice between two workers and one. `prefill_cost`: seconds, if these are compared."""
    if not whole:
        return {"whole_workers": 0, "is_remote": True}
    uncached = min(one.own_prefill_tokens for one in whole)
    terms: dict[str, float] = {"uncached_tokens": uncached}
    costs = policy.costs(request, whole, moment)
    if isinstance(costs, InBlocks) or least_tokens is not None:
        least = FEW_TOKENS if least_tokens is None else least_tokens
        return terms | {"least_tokens": least, "is_remote": uncached > least}
    transfer_s = moment.tables.transfers.seconds(decode.own_prefill_tokens, moment.now)
    rows = zip(costs.wait_and_added_s(), costs.own_s, whole.decoding(), strict=True)
    local_s = min(
        wait_s + own_s + MU * count * (own_s - moment.speed.fixed_s) for wait_s, own_s, count in rows
    )
    remote_s = prefill_cost + transfer_s
    seconds = {"remote_s": remote_s, "local_s": local_s, "transfer_s": transfer_s}
    return terms | seconds | {"is_remote": remote_s < local_s}
