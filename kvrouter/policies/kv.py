"""Mode `kv`: the lowest `overlap_weight * prefill_blocks + decode_blocks`."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.cost import cost, lowest, sample
from kvrouter.core.policy import Candidate, PolicyState, RouteRequest


class Kv:
    """Source: NVIDIA Dynamo, "KV cache routing". Ties are broken at random."""

    needs_tokens = True

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """Temperature 0: the lowest cost. Above: softmax over the normalised costs."""
        weight = state.overlap_weight if request.overlap_weight is None else request.overlap_weight
        temperature = state.temperature if request.temperature is None else request.temperature
        costs = [cost(weight, candidate.prefill_blocks, candidate.decode_blocks) for candidate in candidates]
        if temperature > 0:
            return sample(costs, temperature, state.random())
        return lowest(costs, state.random())
