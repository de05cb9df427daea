"""What a request costs on each target, and the choice by it: what mode `kv` compares.

    a number as weight     cost   = overlap_weight * prefill_blocks + decode_blocks         in blocks
    weight `auto`          cost_s = wait_s + own_s * (1 + gamma)                            in seconds

    the target's queue:   [ head ▓▓▓▓░░░ ][ next ][ next ]   +   [ own uncached tokens ]
                            done ┘  └──── wait_s ───────┘          └──── own_s ──────┘

The first is the published formula (NVIDIA Dynamo, "KV cache routing", Cost Calculation), with the terms of
docs/concepts/design.md#cost. The second is derived in docs/concepts/decide.md. The C versions are in
core/native/columns.pyx.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from statistics import median_low
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.native import versions
from kvrouter.core.routing.policy import Candidate
from kvrouter.core.tables.prefill_speeds import CONTEXT_SLOPE, Speed

# Costs that differ by less, relative to the larger, are equal: sums in another order round differently, and a
# tie must stay a tie, or one worker would get all requests.
EQUAL_WITHIN = 1e-9

# A head that should have ended just now still takes its last step.
LEAST_LEFT = 0.02
# Under overload the wait says more about the queue than about the request, so its price is bounded.
MOST_GAMMA = 8.0

# For `auto` while seconds cannot be predicted: of the fixed weights the best under load (docs/policies.md).
FALLBACK_WEIGHT = 8.0

# The term of a decision that is compared with weight `auto`; its parts are `seconds.waiting` and so on.
SECONDS = "seconds.total"

_NOTHING: Mapping[str, Sequence[float]] = {}
"""No term was added."""


class Costs(Struct, frozen=True, gc=False):
    """The cost on each target; the lowest is taken.

    `block`: one block in the unit of `each`. `added`: what `plus` added, in blocks, by the name of the term.
    """

    each: list[float]
    block: float
    added: Mapping[str, Sequence[float]]

    def plus(self, name: str, blocks: Sequence[float]) -> Self:
        """With one more term: these blocks on each target, or with seconds the time to compute them."""
        each = [cost + self.block * count for cost, count in zip(self.each, blocks, strict=True)]
        return replace(self, each=each, added={**self.added, name: blocks})

    def added_blocks(self) -> list[float]:
        """The terms that were added, summed up, for each target."""
        if not self.added:
            return [0.0] * len(self.each)
        return [sum(blocks) for blocks in zip(*self.added.values(), strict=True)]

    def show_added(self, rows: Sequence[dict[str, float]]) -> None:
        """Write the terms that were added into the rows of a decision, one for each target."""
        for name, blocks in self.added.items():
            for row, count in zip(rows, blocks, strict=True):
                row[f"{name}_blocks"] = count


class InBlocks(Costs, frozen=True, gc=False):
    """The published formula."""

    overlap_weight: float


class InSeconds(Costs, frozen=True, gc=False):
    """The seconds until each target would send a first byte, with the price of congestion, `gamma`.

    `block`: the seconds for one block on an idle target. `earliest_s`: the least `wait_s + own_s`.
    """

    wait_s: array[float]
    own_s: array[float]
    gamma: float
    earliest_s: float

    def wait_and_added_s(self) -> array[float]:
        """`wait_s` with the terms that were added."""
        if not self.added:
            return self.wait_s
        added_s = [self.block * blocks for blocks in self.added_blocks()]
        return array("d", map(add, self.wait_s, added_s))


def in_blocks(  # noqa: PLR0917  # on the hot path: keywords cost
    overlap_weight: float,
    block_size: int,
    charged: array[int],
    own: array[int],
    active: array[int],
    own_blocks: array[int],
) -> InBlocks:
    """The columns are those of `Candidates`: tokens and blocks of others, and of the request itself."""
    native = versions.chosen.columns
    if native is not None:
        each = native.costs(overlap_weight, block_size, charged, own, active, own_blocks)
        return InBlocks(each, 1.0, _NOTHING, overlap_weight)
    each = [
        overlap_weight * ((charged_tokens + own_tokens) / block_size) + (held + more)
        for charged_tokens, own_tokens, held, more in zip(charged, own, active, own_blocks, strict=True)
    ]
    return InBlocks(each, 1.0, _NOTHING, overlap_weight)


def per_token_s(seconds_per_token: float, context_tokens: int) -> float:
    """Seconds for a token of prefill on a target where sequences of so much context decode."""
    return seconds_per_token * (1 + CONTEXT_SLOPE * context_tokens)


def left_s(expected_s: float, elapsed_s: float) -> float:
    """Seconds that the running prefill still takes.

    One that is overdue is slower than predicted, or requests that are not known of go first: it is expected
    to take as long again as it is overdue. So a target that stands still looks worse with every second.
    """
    return max(abs(expected_s - elapsed_s), LEAST_LEFT * expected_s)


def in_seconds(  # noqa: PLR0917  # on the hot path: keywords cost
    now: float,
    speed: Speed,
    arrivals_per_s: float,
    block_size: int,
    charged: array[int],
    prompts: array[int],
    heads: array[int],
    context: array[int],
    began: array[float],
    own: array[int],
) -> InSeconds:
    """The columns are those of `Candidates`; there is at least one target.

    Each prompt takes `speed.fixed_s` besides its tokens, also those that wait: of nearly cached ones that is
    most.
    """
    fixed_s, seconds_per_token = speed.fixed_s, speed.seconds_per_token
    block_s = seconds_per_token * block_size
    native = versions.chosen.columns
    if native is not None:
        each, wait_s, own_s, gamma, earliest_s = native.cost_s(
            now, fixed_s, seconds_per_token, arrivals_per_s, CONTEXT_SLOPE, LEAST_LEFT, MOST_GAMMA,
            charged, prompts, heads, context, began, own,
        )  # fmt: skip
        return InSeconds(each, block_s, _NOTHING, wait_s, own_s, gamma, earliest_s)
    waits, owns = array("d"), array("d")
    for i, charged_tokens in enumerate(charged):
        per_token = per_token_s(seconds_per_token, context[i])
        wait = 0.0
        if charged_tokens > 0:
            head_s = left_s(fixed_s + heads[i] * per_token, now - began[i])
            wait = head_s + (charged_tokens - heads[i]) * per_token + (prompts[i] - 1) * fixed_s
        waits.append(wait)
        owns.append(fixed_s + own[i] * per_token)
    # One more second of work here delays the requests that arrive while it waits. The median, because a mean
    # follows the one target that every request wants.
    gamma = min(MOST_GAMMA, arrivals_per_s / len(waits) * median_low(waits))
    each = [wait + seconds * (1 + gamma) for wait, seconds in zip(waits, owns, strict=True)]
    return InSeconds(each, block_s, _NOTHING, waits, owns, gamma, min(map(add, waits, owns)))


def terms_in_seconds(candidates: Iterable[Candidate], costs: InSeconds) -> list[dict[str, float]]:
    """The seconds that are compared and their parts, then the published formula that gives the same order."""
    rows = []
    for i, one in enumerate(candidates):
        cost, wait_s, own_s = costs.each[i] / costs.block, costs.wait_s[i], costs.own_s[i]
        weight = (cost - one.decode_blocks) / (one.prefill_blocks or 1)
        parts = {"waiting": wait_s, "own_prefill": own_s, "congestion": own_s * costs.gamma}
        parts |= {name: costs.block * blocks[i] for name, blocks in costs.added.items()}
        rows.append(
            {f"seconds.{name}": value for name, value in parts.items()}
            | {
                SECONDS: costs.each[i],
                "prefill_blocks": one.prefill_blocks,
                "decode_blocks": one.decode_blocks,
                "cost": cost,
                "equivalent_weight": weight,
                "requests": one.requests,
                "gamma": costs.gamma,
                # the names of earlier versions
                "overlap_weight": weight,
                "wait_s": wait_s,
                "own_s": own_s,
            }
        )
    return rows


def next_copies(
    overlap: array[int], wait_s: array[float], own_s: array[float], most_holders: float
) -> list[int]:
    """Of the targets that hold less than the deepest: those where `wait_s + own_s` is least.

    None if `most_holders` targets or more hold the deepest. Without gamma: the work delays others once, and
    is saved with every later request.
    """
    native = versions.chosen.columns
    if native is not None:
        found: list[int] = native.next_copies(overlap, wait_s, own_s, most_holders, EQUAL_WITHIN)
        return found
    deepest = max(overlap)
    seconds = {i: wait_s[i] + own_s[i] for i, blocks in enumerate(overlap) if blocks < deepest}
    if not seconds or len(overlap) - len(seconds) >= most_holders:
        return []
    least = min(seconds.values())
    return [i for i, value in seconds.items() if math.isclose(value, least, rel_tol=EQUAL_WITHIN)]


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
