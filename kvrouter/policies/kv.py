"""Mode `kv`: the lowest `overlap_weight * prefill_blocks + decode_blocks`.

A number as the weight is the published formula. With `auto` each target gets the weight at which the formula
gives the seconds until its first byte (core/routing/prefill_times.py, docs/concepts/decide.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import cost, lowest, poured, sample, spread
from kvrouter.core.routing.policy import AUTO, Candidate, OverlapWeight, RouteRequest
from kvrouter.core.routing.prefill_times import Costs

# With fewer unseen bookings, one in twenty decisions, the lowest cost is taken: spreading would cost overlap.
NEGLIGIBLE = 0.05

OVERLAP_WEIGHT = 1.0
# For `auto` while seconds cannot be predicted: of the fixed weights the best under load (docs/policies.md).
FALLBACK_WEIGHT = 8.0


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
    prefers_sessions = True
    reads_speed = True  # whatever its own weight: a request may ask for `auto`

    @property
    def compares_seconds(self) -> bool:
        return self.overlap_weight == AUTO

    def flags_without_effect(self) -> list[str]:
        """The flags that were given, and that weight `auto` does not use."""
        given = {
            "--router-active-request-weight": self.request_weight,
            "--router-kv-overlap-score-credit-decay": self.overlap_decay,
        }
        return [flag for flag, value in given.items() if value] if self.compares_seconds else []

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        """While other replicas choose too, the choice is spread: else all would take the same worker."""
        if not request.prompts:  # its blocks are not known, so only the requests in flight can decide
            return lowest(candidates.requests(), moment.random())
        weight = self._weight(request, moment)
        temperature = self.temperature if request.temperature is None else request.temperature
        if weight == AUTO:
            return self._earliest(request, candidates, moment, temperature)
        costs = self.costs(request, candidates, weight)
        if temperature > 0:
            return sample(costs, temperature, moment.random())
        if moment.unseen < NEGLIGIBLE:
            return lowest(costs, moment.random())
        # The unseen requests are assumed to cost what this one does. With ties alone, eight replicas send a
        # burst of 8 to one idle worker; with spreading it gets 3 (docs/benchmarks.md, herding).
        return _spread(costs, _own_cost(candidates, costs, weight), moment)

    def _earliest(
        self, request: RouteRequest, candidates: Candidates, moment: Moment, temperature: float
    ) -> int:
        """The least seconds; or one more copy of a prefix that many requests share."""
        costs = self._seconds(request, candidates, moment)
        if temperature > 0:
            return sample(costs.cost_s, temperature, moment.random())
        if moment.unseen < NEGLIGIBLE:
            best = lowest(costs.cost_s, moment.random())
        else:
            best = _spread(costs.cost_s, _own_s(costs), moment)
        copy = self._next_copy(request, candidates, moment, costs) if candidates.holds_deepest(best) else None
        return best if copy is None else copy

    def _next_copy(
        self, request: RouteRequest, candidates: Candidates, moment: Moment, costs: Costs
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

    def _seconds(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Costs:
        return candidates.costs_in_seconds(moment.now, moment.speed, moment.arrivals_per_s)

    def costs(self, request: RouteRequest, candidates: Candidates, weight: float) -> list[float]:
        """What each candidate costs, in blocks."""
        costs = candidates.costs(weight)
        if not self.overlap_decay and not self.request_weight:
            return costs
        lost, requests = self._lost_blocks(request, candidates), candidates.requests()
        return [
            value + weight * decayed + self.request_weight * count
            for value, decayed, count in zip(costs, lost, requests, strict=True)
        ]

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
        weight = self._weight(request, moment)
        if weight == AUTO:
            return self._terms_in_time(request, candidates, moment)
        costs = self.costs(request, candidates, weight)
        rows = zip(candidates, self._lost_blocks(request, candidates), costs, strict=True)
        terms: list[dict[str, float]] = [
            {
                "prefill_blocks": one.prefill_blocks,
                "decayed_blocks": lost,
                "overlap_weight": weight,
                "decode_blocks": one.decode_blocks,
                "requests": one.requests,
                "cost": value,
            }
            for one, lost, value in rows
        ]
        if self._is_spread(request, moment):
            depths = poured(costs, moment.unseen * _own_cost(candidates, costs, weight))
            for row, depth in zip(terms, depths, strict=True):
                row["unseen_cost"] = depth
        return terms

    def _terms_in_time(
        self, request: RouteRequest, candidates: Candidates, moment: Moment
    ) -> list[dict[str, float]]:
        """The formula's terms with each target's own weight, and the seconds that are compared."""
        costs, token_s = self._seconds(request, candidates, moment), moment.speed.seconds_per_token
        rows = []
        for i, one in enumerate(candidates):
            value = costs.cost_s[i] / (token_s * (one.block_size or one.card.block_size))
            rows.append(
                {
                    "prefill_blocks": one.prefill_blocks,
                    "overlap_weight": (value - one.decode_blocks) / (one.prefill_blocks or 1),
                    "decode_blocks": one.decode_blocks,
                    "requests": one.requests,
                    "cost": value,
                    "wait_s": costs.wait_s[i],
                    "own_s": costs.own_s[i],
                    "gamma": costs.gamma,
                }
            )
        if self._is_spread(request, moment):
            depths = poured(costs.cost_s, moment.unseen * _own_s(costs))
            for row, depth in zip(rows, depths, strict=True):
                row["unseen_s"] = depth
        return rows

    def _is_spread(self, request: RouteRequest, moment: Moment) -> bool:
        """Whether replicas take different targets."""
        temperature = self.temperature if request.temperature is None else request.temperature
        return temperature <= 0 and moment.unseen >= NEGLIGIBLE

    def _weight(self, request: RouteRequest, moment: Moment) -> OverlapWeight:
        weight = self.overlap_weight if request.overlap_weight is None else request.overlap_weight
        return FALLBACK_WEIGHT if weight == AUTO and moment.doubt else weight


def _own_cost(candidates: Candidates, costs: Sequence[float], weight: float) -> float:
    """What the request itself costs where the cost is lowest, in blocks."""
    best = candidates[costs.index(min(costs))]
    own_prefill_blocks = best.prefill_blocks * best.own_prefill_tokens / max(1, best.prefill_tokens)
    return cost(weight, own_prefill_blocks, best.own_decode_blocks)


def _own_s(costs: Costs) -> float:
    """The seconds that the request itself takes where the cost is lowest."""
    return costs.own_s[costs.cost_s.index(min(costs.cost_s))]


def _spread(costs: Sequence[float], own_cost: float, moment: Moment) -> int:
    return spread(costs, own_cost, moment.unseen, moment.part, moment.random())
