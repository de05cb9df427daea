"""The cost of a candidate: `overlap_weight * prefill_blocks + decode_blocks`, in blocks; lower is better.

Source: NVIDIA Dynamo, "KV cache routing", Cost Calculation; the terms as in docs/concepts/design.md#cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

# The worth of a block in host memory or on disk, relative to one on the device. Source: Dynamo's defaults.
HOST_CREDIT = 0.75
DISK_CREDIT = 0.25

# Costs that differ by less, relative to the larger, are equal: sums in another order round differently, and a
# tie must stay a tie, or one worker would get all requests.
EQUAL_WITHIN = 1e-9


_KNOWN = frozenset({"", "exact"})


class Prompt(Struct, frozen=True, gc=False):
    """One prompt: the sequence hashes of its full blocks, and its length in tokens.

    `is_estimate`: only its beginning was tokenized, or nothing; the length is an estimate.
    `block_size`: what the hashes were made with; the pool's may have changed since. 0: the pool's.
    `is_text`: the hashes are of text, which no engine's event names: only assumed blocks match.
    `media`: of a prompt with images or other media: "exact", or why overlap ends before one of them.
    """

    hashes: Sequence[int]
    isl: int
    is_estimate: bool = False
    block_size: int = 0
    is_text: bool = False
    media: str = ""

    @property
    def is_known(self) -> bool:
        """Whether its tokens are those of the engine, as far as they reach."""
        return self.media in _KNOWN


class Overlap(Struct, frozen=True, gc=False):
    """What one prompt finds on one target.

    `overlap_blocks`: the blocks that the engine can skip. `credit_blocks`: the same with the blocks of slower
    tiers, at their worth. `widest_blocks`: the depth over all tiers, which the engine's cached_tokens should
    match.
    """

    overlap_blocks: int
    credit_blocks: float
    widest_blocks: int


def cost(overlap_weight: float, prefill_blocks: float, decode_blocks: float) -> float:
    """The published formula. `cost(1, 8, 10) == 18`."""
    return overlap_weight * prefill_blocks + decode_blocks


def find_overlap(isl: int, block_size: int, tier_depths: Sequence[int], in_flight_depth: int) -> Overlap:
    """The overlap from the index's depth per tier set, and from the depth that requests in flight hold."""
    # an engine always computes the last token, so the overlap never includes it
    most = max(0, isl - 1) // block_size
    device = min(max(tier_depths[0] if tier_depths else 0, in_flight_depth), most)
    if len(tier_depths) < 2:
        return Overlap(device, device, device)
    host = min(max(tier_depths[1], device), most)
    disk = min(max(tier_depths[2], host), most) if len(tier_depths) > 2 else host
    credit = device + HOST_CREDIT * (host - device) + DISK_CREDIT * (disk - host)
    return Overlap(device, credit, disk)


def uncached_tokens(isl: int, block_size: int, overlap: Overlap) -> int:
    """The prompt tokens that the target would have to compute, rounded to whole tokens."""
    return max(0, round(isl - overlap.credit_blocks * block_size))


def lowest(costs: Sequence[float], chance: float) -> int:
    """The index of the lowest cost; `chance` in [0, 1) decides among the equal."""
    least = min(costs)
    # a cheap first pass for thousands of costs: nothing above the edge can be equal to the least
    edge = least + 2 * EQUAL_WITHIN * abs(least)
    near = [i for i, value in enumerate(costs) if value <= edge]
    if len(near) == 1:
        return near[0]
    ties = [i for i in near if math.isclose(costs[i], least, rel_tol=EQUAL_WITHIN)]
    return ties[int(chance * len(ties))]


def spread(costs: Sequence[float], own_cost: float, unseen: float, part: float, chance: float) -> int:
    """Choose while other replicas choose: each one takes another of the cheapest candidates.

        water  ▇ ▆ ▄ ▃ ▁      `unseen` requests of about `own_cost` each go where the cost is
        cost   ▁ ▂ ▄ ▅ ▇ █    lowest: poured over the costs like water, they rise to one level
               └0┘└1┘└─2─┘    each replica has an equal part of the water

    The choice is the cheapest candidate of this replica's part, which begins at the share `part` of the
    water. So replicas that see the same fleet do not choose the same candidate, and the load that they add
    together is level. Without water: the lowest cost, where `chance` in [0, 1) decides among the equal.
    """
    depths = poured(costs, unseen * own_cost)
    before = sum(depths) * part
    for i in sorted(range(len(costs)), key=costs.__getitem__):
        before -= depths[i]
        if before < 0:
            return i
    return lowest(costs, chance)


def poured(costs: Sequence[float], volume: float) -> list[float]:
    """The depth of the water on each candidate."""
    level = _level(sorted(costs), volume)
    return [max(0.0, level - value) for value in costs]


def _level(ordered: Sequence[float], volume: float) -> float:
    """The level to which `volume` rises over a ground of these heights, lowest first."""
    total = 0.0
    for count, height in enumerate(ordered, start=1):
        total += height
        level = (volume + total) / count
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("unreachable: the last height ends the loop")


def _draw(weights: Sequence[float], chance: float) -> int:
    """An index with a probability proportional to its weight; `chance` in [0, 1) is where to draw."""
    left = chance * sum(weights)
    for i, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return i
    # rounding can leave a rest above the last weight
    return max(i for i, weight in enumerate(weights) if weight > 0)


def sample(costs: Sequence[float], temperature: float, chance: float) -> int:
    """Softmax over the normalised costs: weight `exp(-(cost - min) / ((max - min) * temperature))`.

    All equal means all equally likely. `chance` in [0, 1) is where in the distribution to draw.
    """
    least, most = min(costs), max(costs)
    if most == least:
        return int(chance * len(costs))
    if math.isinf(most):
        return lowest(costs, chance)  # an overlap weight near the largest float: the difference would be NaN
    width = most - least  # divided first: its product with a tiny temperature may be 0
    return _draw([math.exp(-(value - least) / width / temperature) for value in costs], chance)


def sample_scores(scores: Sequence[float], temperature: float, chance: float) -> int:
    """Softmax over raw scores, higher being better: weight `exp(score / temperature)`."""
    most = max(scores)
    if math.isinf(most):
        return lowest([-score for score in scores], chance)
    return _draw([math.exp((score - most) / temperature) for score in scores], chance)
