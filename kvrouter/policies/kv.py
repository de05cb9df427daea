"""Mode `kv`: the lowest `overlap_weight * prefill_blocks + decode_blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core.routing.candidates import Candidates, requests_of
from kvrouter.core.routing.cost import cost, lowest, sample, spread
from kvrouter.core.routing.policy import Candidate, Policy, PolicyState, RouteRequest

NEGLIGIBLE = 0.05
"""With fewer unseen bookings than this, one in twenty decisions, the lowest cost is simply taken."""

GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio fall evenly into [0, 1): a replica's own draws do not clump, while
those of replicas that began at different turns are independent."""

OVERLAP_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class Kv(Policy):
    """Source: NVIDIA Dynamo, "KV cache routing". Ties are broken at random.

    `overlap_decay`: the overlap of a target with more prefill charged than the least charged one
    counts as 1 / (1 + decay * excess), excess in prompts like this one. `request_weight`: blocks
    that each request in flight there costs.
    """

    overlap_decay: float = 0.0
    request_weight: float = 0.0

    decisive = ("cost",)

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """Temperature 0: the lowest cost. Above: softmax over the normalised costs.

        While other replicas are choosing too, the choice is spread so that they do not all take the
        same worker.
        """
        if not request.prompts:  # nothing is known of its blocks: it goes where the fewest requests are
            return lowest(requests_of(candidates), state.random())
        weight = _weight(request, state)
        temperature = state.temperature if request.temperature is None else request.temperature
        costs = self.costs(request, candidates, weight)
        if temperature > 0:
            return sample(costs, temperature, state.random())
        if state.unseen < NEGLIGIBLE:
            return lowest(costs, state.random())
        best = candidates[costs.index(min(costs))]
        own_prefill_blocks = best.prefill_blocks * best.own_prefill_tokens / max(1, best.prefill_tokens)
        own_cost = cost(weight, own_prefill_blocks, best.own_decode_blocks)
        state.turn += 1
        return spread(costs, own_cost, state.unseen, state.turn * GOLDEN % 1.0)

    def costs(self, request: RouteRequest, candidates: Sequence[Candidate], weight: float) -> list[float]:
        """What each candidate costs, in blocks."""
        if not self.overlap_decay and not self.request_weight:
            if isinstance(candidates, Candidates):
                return candidates.costs(weight)
            # `cost` written out: a call for each of a thousand targets would be a third of the choice
            return [weight * one.prefill_blocks + one.decode_blocks for one in candidates]
        lost = self._lost_blocks(request, candidates)
        return [
            cost(weight, one.prefill_blocks + decayed, one.decode_blocks) + self.request_weight * one.requests
            for one, decayed in zip(candidates, lost, strict=True)
        ]

    def _lost_blocks(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[float]:
        """How much of each candidate's overlap no longer counts."""
        least = min(candidate.charged_tokens for candidate in candidates)
        length = max(1, request.isl)
        excess = [(candidate.charged_tokens - least) / length for candidate in candidates]
        return [
            one.overlap_blocks * (1 - 1 / (1 + self.overlap_decay * over))
            for one, over in zip(candidates, excess, strict=True)
        ]

    def terms(
        self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> list[dict[str, float]]:
        """The formula's terms and their sum; by requests alone where the tokens are not known."""
        if not request.prompts:
            return [{"requests": candidate.requests} for candidate in candidates]
        weight = _weight(request, state)
        rows = zip(
            candidates, self._lost_blocks(request, candidates), self.costs(request, candidates, weight),
            strict=True,
        )  # fmt: skip
        return [
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


def _weight(request: RouteRequest, state: PolicyState) -> float:
    if request.overlap_weight is not None:
        return request.overlap_weight
    return OVERLAP_WEIGHT if state.overlap_weight is None else state.overlap_weight
