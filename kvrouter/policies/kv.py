"""Mode `kv`: the lowest `overlap_weight * prefill_blocks + decode_blocks`.

A number as the weight is the published formula, in blocks. With `auto` the seconds until each target's first
byte are compared (core/routing/cost.py, docs/concepts/decide.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import (
    InBlocks,
    InSeconds,
    lowest,
    poured,
    sample,
    spread,
    terms_in_seconds,
)
from kvrouter.core.routing.policy import Candidate, OverlapWeight, RouteRequest

# With fewer unseen bookings, one in twenty decisions, the lowest cost is taken: spreading would cost overlap.
NEGLIGIBLE = 0.05

OVERLAP_WEIGHT = 1.0


@dataclass(slots=True)
class Kv(BuiltInPolicy):
    """Source: NVIDIA Dynamo, "KV cache routing". Ties are broken at random.

    `overlap_decay`: the overlap of a target with more prefill charged than the least charged one
    counts as 1 / (1 + decay * excess), excess in prompts like this one. `request_weight`: blocks
    that each request in flight there costs. `temperature` 0: the lowest cost; above: softmax over
    the normalised costs.
    """

    overlap_decay: float = 0.0
    request_weight: float = 0.0
    overlap_weight: OverlapWeight = OVERLAP_WEIGHT
    temperature: float = 0.0

    decisive = ("cost",)
    sessions = "preferred"
    reads_speed = True  # whatever its own weight: a request may ask for `auto`

    def flags_without_effect(self) -> list[str]:
        """The flags that were given, and that weight `auto` does not use."""
        given = {
            "--router-active-request-weight": self.request_weight,
            "--router-kv-overlap-score-credit-decay": self.overlap_decay,
        }
        return [flag for flag, value in given.items() if value] if self.compares_seconds else []

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        """The lowest cost; or, with seconds, one more copy of a prefix that many requests share."""
        if not request.prompts:  # its blocks are not known, so only the requests in flight can decide
            return lowest(candidates.requests(), moment.random())
        costs = self.costs(request, candidates, moment)
        temperature = self.temperature if request.temperature is None else request.temperature
        if temperature > 0:
            return sample(costs.each, temperature, moment.random())
        if moment.unseen < NEGLIGIBLE:
            best = lowest(costs.each, moment.random())
        else:
            # Other replicas choose, too; their unseen requests are assumed to cost what this one does. With
            # ties alone, eight replicas send a burst of 8 to one idle worker; with spreading it gets 3
            # (docs/benchmarks.md, herding).
            own_cost = _own_cost(candidates, costs)
            best = spread(costs.each, own_cost, moment.unseen, moment.part, moment.random())
        if isinstance(costs, InBlocks) or not candidates.holds_deepest(best):
            return best
        copy = self._next_copy(request, candidates, moment, costs)
        return best if copy is None else copy

    def costs(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> InBlocks | InSeconds:
        """What each candidate costs, in blocks or in seconds. `pick` compares this, and `terms` shows it."""
        costs = BuiltInPolicy.costs(self, request, candidates, moment)
        if isinstance(costs, InBlocks) and (self.overlap_decay or self.request_weight):
            costs = self._with_decay(request, candidates, costs)
        return costs

    def _with_decay(self, request: RouteRequest, candidates: Candidates, costs: InBlocks) -> InBlocks:
        """The two terms that belong to the published formula: seconds have no use for them."""
        rows = zip(costs.each, self._lost_blocks(request, candidates), candidates.requests(), strict=True)
        each = [
            cost + costs.overlap_weight * lost + self.request_weight * requests
            for cost, lost, requests in rows
        ]
        return replace(costs, each=each)

    def _next_copy(
        self, request: RouteRequest, candidates: Candidates, moment: Moment, costs: InSeconds
    ) -> int | None:
        """Where to compute a prefix once more, if fewer targets hold it than its share of the requests.

        Without copies, all requests of a hot prefix queue at the targets that hold it: there each one is a
        little cheaper, and no single request gains by a second copy.
        """
        hashes, depth = candidates.held_of(request)
        wanted = moment.tables.shares.share(hashes[depth - 1]) * len(candidates) if depth else 0.0
        if wanted <= 1:
            return None
        ties = candidates.next_copies(costs, wanted)
        return ties[int(moment.random() * len(ties))] if ties else None

    def _lost_blocks(self, request: RouteRequest, candidates: Candidates) -> Sequence[float]:
        """How much of each candidate's overlap no longer counts."""
        charged, overlap = candidates.charged_tokens(), candidates.overlap_blocks()
        least, length = min(charged), max(1, request.isl)
        return [
            blocks * (1 - 1 / (1 + self.overlap_decay * (tokens - least) / length))
            for blocks, tokens in zip(overlap, charged, strict=True)
        ]

    def terms(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        """The formula's terms and their sum; requests alone where the tokens are not known."""
        if not request.prompts:
            return [{"requests": requests} for requests in candidates.requests()]
        costs = self.costs(request, candidates, moment)
        if isinstance(costs, InSeconds):
            rows, unseen = terms_in_seconds(candidates, costs), "unseen_s"
        else:
            rows, unseen = self._terms_in_blocks(request, candidates, costs), "unseen_cost"
        costs.show_added(rows)
        if self._is_spread(request, moment):
            depths = poured(costs.each, moment.unseen * _own_cost(candidates, costs))
            for row, depth in zip(rows, depths, strict=True):
                row[unseen] = depth
        return rows

    def _terms_in_blocks(
        self, request: RouteRequest, candidates: Candidates, costs: InBlocks
    ) -> list[dict[str, float]]:
        rows = zip(candidates, self._lost_blocks(request, candidates), costs.each, strict=True)
        return [
            {
                "prefill_blocks": one.prefill_blocks,
                "decayed_blocks": lost,
                "overlap_weight": costs.overlap_weight,
                "decode_blocks": one.decode_blocks,
                "requests": one.requests,
                "cost": cost,
            }
            for one, lost, cost in rows
        ]

    def _is_spread(self, request: RouteRequest, moment: Moment) -> bool:
        """Whether replicas take different targets."""
        temperature = self.temperature if request.temperature is None else request.temperature
        return temperature <= 0 and moment.unseen >= NEGLIGIBLE


def _own_cost(candidates: Candidates, costs: InBlocks | InSeconds) -> float:
    """What the request itself costs where the cost is lowest."""
    place = costs.each.index(min(costs.each))
    if isinstance(costs, InSeconds):
        return costs.own_s[place]
    best = candidates[place]
    own_prefill_blocks = best.prefill_blocks * best.own_prefill_tokens / max(1, best.prefill_tokens)
    return costs.overlap_weight * own_prefill_blocks + best.own_decode_blocks
