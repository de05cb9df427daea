"""Mode `kv`: the lowest `overlap_weight * prefill_blocks + decode_blocks`."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.cost import cost, lowest, sample, spread
from kvrouter.core.policy import Candidate, PolicyState, RouteRequest

NEGLIGIBLE = 0.05
"""With fewer unseen bookings than this, one in twenty decisions, the lowest cost is simply taken."""

GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio fall evenly into [0, 1): a replica's own draws do not clump, while
those of replicas that began at different turns are independent."""


class Kv:
    """Source: NVIDIA Dynamo, "KV cache routing". Ties are broken at random."""

    needs_tokens = True

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """Temperature 0: the lowest cost. Above: softmax over the normalised costs.

        While other replicas are choosing too, the choice is spread so that they do not all take the
        same worker.
        """
        if not request.prompts:  # nothing is known of its blocks: it goes where the fewest requests are
            return lowest([candidate.requests for candidate in candidates], state.random())
        weight = state.overlap_weight if request.overlap_weight is None else request.overlap_weight
        temperature = state.temperature if request.temperature is None else request.temperature
        costs = [cost(weight, candidate.prefill_blocks, candidate.decode_blocks) for candidate in candidates]
        if temperature > 0:
            return sample(costs, temperature, state.random())
        if state.unseen < NEGLIGIBLE:
            return lowest(costs, state.random())
        best = candidates[costs.index(min(costs))]
        own_prefill_blocks = best.prefill_blocks * best.own_prefill_tokens / max(1, best.prefill_tokens)
        own_cost = cost(weight, own_prefill_blocks, best.own_decode_blocks)
        state.turn += 1
        return spread(costs, own_cost, state.unseen, state.turn * GOLDEN % 1.0)
