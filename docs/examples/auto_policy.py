"""The default rule of mode kv (weight `auto`) as a custom policy, by public names of kvrouter alone.

Left out is what a policy is not shown: how replicas spread bookings that they do not know of yet.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median_low

from kvrouter import Candidate, Choice, Policy, RouteRequest

FALLBACK_WEIGHT, MOST_GAMMA = 8.0, 8.0
FEWEST, MOST = 32, 1024  # requests of which the share of a prefix is taken


class Auto(Policy):
    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()  # requests by their deepest block that any target holds
        self.requests = 0.0

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        if not request.prompts:
            return [candidates]  # the fewest requests
        block = self.deepest_block(request, candidates)
        if request.doubt:
            best = least([FALLBACK_WEIGHT * one.prefill_blocks + one.decode_blocks for one in candidates])
            self.count(block)
            return candidates[best]
        arrivals = request.arrivals_per_s / len(candidates)
        gamma = min(MOST_GAMMA, arrivals * median_low([one.wait_s for one in candidates]))
        choice = candidates[least([one.wait_s + one.own_s * (1 + gamma) for one in candidates])]
        deepest = max(one.overlap_blocks for one in candidates)
        others = [one for one in candidates if one.overlap_blocks < deepest]
        holders = len(candidates) - len(others)
        is_copied = choice.overlap_blocks == deepest and holders < self.share(block) * len(candidates)
        if block is not None and others and is_copied:
            choice = others[least([one.wait_s + one.own_s for one in others])]
        self.count(block)
        return choice

    def deepest_block(self, request: RouteRequest, candidates: Sequence[Candidate]) -> int | None:
        deepest = max(one.overlap_blocks for one in candidates)
        return request.prompts[0].hashes[deepest - 1] if deepest and len(request.prompts) == 1 else None

    def share(self, block: int | None) -> float:
        count = self.counts[block] if block is not None else 0
        return count / max(self.requests, FEWEST) if count >= 2 else 0.0

    def count(self, block: int | None) -> None:
        self.requests += 1
        if block is not None:
            self.counts[block] += 1
        if self.requests > MOST:  # the past fades, and the table stays small
            self.requests /= 2
            self.counts = Counter({key: count / 2 for key, count in self.counts.items() if count >= 2})


def least(values: list[float]) -> int:
    """The first of the least values, which may differ by rounding."""
    lowest = min(values)
    return next(i for i, value in enumerate(values) if value <= lowest * (1 + 1e-9))
