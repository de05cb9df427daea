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

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import FALLBACK_WEIGHT, SECONDS, lowest
from kvrouter.core.routing.policy import AUTO, Candidate, OverlapWeight, RouteRequest
from kvrouter.core.routing.selection import Decision, Selection
from kvrouter.core.wire.ids import Target

MU = 0.2
# With fewer uncached tokens a prompt stays at its decode worker, where seconds are not compared: the
# threshold of vllm-router is 256, those of llm-d's examples 8 and 512, Dynamo's 2,048.
FEW_TOKENS = 512


@dataclass(slots=True)
class PrefillHalf(BuiltInPolicy):
    """Chooses the worker that computes the prompt. `weight` None: seconds are compared."""

    weight: float | None

    decisive = ("cost",)

    def costs(self, candidates: Candidates, moment: Moment) -> Sequence[float]:
        """Seconds, or blocks."""
        if self.weight is None:
            return candidates.costs_in_seconds(moment.now, moment.speed, moment.arrivals_per_s).each
        return [self.weight * one.prefill_blocks for one in candidates]

    def pick(self, _request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return lowest(self.costs(candidates, moment), moment.random())

    def terms(
        self,
        _request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        costs = self.costs(candidates, moment)
        name = SECONDS if self.weight is None else "overlap_weight"
        shown = costs if self.weight is None else [self.weight] * len(costs)
        rows = zip(candidates, costs, shown, strict=True)
        return [
            {name: value, "prefill_blocks": one.prefill_blocks, "cost": cost} for one, cost, value in rows
        ]


@dataclass(slots=True)
class DecodeHalf(BuiltInPolicy):
    """Chooses the worker that generates the answer: the fewest blocks that it would hold beyond its own.

    Blocks that it has already are not handed over. With a number as the weight they do not count: that is
    the published formula without its prefill.
    """

    counts_overlap: bool

    decisive = ("cost",)

    def pick(self, _request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return lowest(self._costs(candidates), moment.random())

    def _costs(self, candidates: Candidates) -> list[float]:
        """Those without room for the prompt come last."""
        # a tier with 0 has an unknown size: then nothing is known of the room
        rooms = [sum(one.card.tiers.values()) if all(one.card.tiers.values()) else 0 for one in candidates]
        most = max(one.decode_blocks for one in candidates)
        return [
            one.decode_blocks
            - self.counts_overlap * one.overlap_blocks
            + (most if 0 < room < one.decode_blocks else 0)
            for one, room in zip(candidates, rooms, strict=True)
        ]

    def terms(
        self,
        _request: RouteRequest,
        candidates: Candidates,
        _moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        rows = zip(candidates, self._costs(candidates), strict=True)
        return [
            {"decode_blocks": one.decode_blocks, "overlap_blocks": one.overlap_blocks, "cost": cost}
            for one, cost in rows
        ]


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


def choose_pair(  # noqa: PLR0917
    request: RouteRequest,
    selection: Selection,
    islands: Sequence[tuple[Candidates, Candidates]],
    whole: Candidates,
    moment: Moment,
    least_tokens: int | None,
    computed_at: Target | None = None,
) -> Sharing:
    """The two workers, if they serve the request better than one of `whole` alone.

    `islands`: prefill and decode workers that can hand over to each other. `least_tokens`: the operator's
    threshold in place of the rule. `computed_at`: the prompt is computed there already, so only the other
    one is chosen.
    """
    weight = weight_of(request, selection.policy, moment)
    first_half = PrefillHalf(weight)
    prefill = replace_fields(selection, policy=first_half)
    decode = replace_fields(selection, policy=DecodeHalf(counts_overlap=weight is None))
    best: tuple[float, Candidate, Candidates, Candidates] | None = None
    for all_prefillers, all_decoders in islands:
        decoders = decode.eligible(request, all_decoders, moment)
        prefillers = _not_resting(prefill.eligible(request, all_prefillers, moment), decoders, moment)
        if computed_at is not None:
            prefillers = prefillers.kept([one == computed_at for one in prefillers.targets()])
        if not (prefillers and decoders):
            continue
        costs = first_half.costs(prefillers, moment)
        place = first_half.pick(request, prefillers, moment)
        if best is None or costs[place] < best[0]:
            best = costs[place], prefillers[place], prefillers, decoders
    if best is None:
        return Sharing()
    cost, computes, prefillers, decoders = best
    rests = moment.tables.transfers.rests
    first = computes.target.worker_id
    decoders = decoders.kept(
        [not rests(first, target.worker_id, moment.now) for target in decoders.targets()]
    )
    if not decoders:
        return Sharing()
    answers = decode.choose(request, decoders, moment)[0]
    terms = _compared(whole, answers, None if weight is not None else cost, moment, least_tokens)
    is_remote = terms.pop("is_remote") or computed_at is not None  # what is computed is not computed twice
    pair = Pair(computes, answers, prefill, decode, prefillers, decoders) if is_remote else None
    return Sharing(pair, terms)


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


def weight_of(request: RouteRequest, policy: BuiltInPolicy, moment: Moment) -> float | None:
    """The weight of the published formula; None: seconds are compared."""
    weight: OverlapWeight | None = request.overlap_weight
    weight = policy.overlap_weight if weight is None else weight
    if weight == AUTO and not moment.doubt:
        return None
    if weight == AUTO:
        return FALLBACK_WEIGHT
    return 1.0 if weight is None else weight  # above 0 a weight only scales the costs


def _compared(
    whole: Candidates, decode: Candidate, prefill_s: float | None, moment: Moment, least_tokens: int | None
) -> dict[str, float]:
    """The terms of the choice between two workers and one.

    `prefill_s`: of the prefill worker; None: seconds are not compared.
    """
    if not whole:
        return {"whole_workers": 0, "is_remote": True}
    uncached = min(one.own_prefill_tokens for one in whole)
    terms: dict[str, float] = {"uncached_tokens": uncached}
    if prefill_s is None or least_tokens is not None:
        least = FEW_TOKENS if least_tokens is None else least_tokens
        return terms | {"least_tokens": least, "is_remote": uncached > least}
    costs, decoding = (
        whole.costs_in_seconds(moment.now, moment.speed, moment.arrivals_per_s),
        whole.decoding(),
    )
    transfer_s = moment.tables.transfers.seconds(decode.own_prefill_tokens, moment.now)
    local_s = min(
        wait_s + own_s + MU * count * (own_s - moment.speed.fixed_s)
        for wait_s, own_s, count in zip(costs.wait_and_added_s(), costs.own_s, decoding, strict=True)
    )
    remote_s = prefill_s + transfer_s
    seconds = {"remote_s": remote_s, "local_s": local_s, "transfer_s": transfer_s}
    return terms | seconds | {"is_remote": remote_s < local_s}
