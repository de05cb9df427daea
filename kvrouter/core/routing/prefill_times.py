"""The seconds until each target would send a first byte: what weight `auto` of mode kv compares.

    the target's queue:   [ head ▓▓▓▓░░░ ][ next ][ next ]   +   [ own uncached tokens ]
                            done ┘  └──── wait_s ───────┘          └──── own_s ──────┘

    cost_s = wait_s + own_s * (1 + gamma)

The derivation is in docs/concepts/decide.md. The C versions are in core/native/columns.pyx.
"""

from __future__ import annotations

import math
from array import array
from operator import add
from statistics import median_low

from msgspec import Struct

from kvrouter.core.native import versions
from kvrouter.core.routing.cost import EQUAL_WITHIN
from kvrouter.core.tables.prefill_speeds import CONTEXT_SLOPE

# A head that should have ended just now still takes its last step.
LEAST_LEFT = 0.02
# Under overload the wait says more about the queue than about the request, so its price is bounded.
MOST_GAMMA = 8.0


class Costs(Struct, frozen=True):
    """What a request would take on each target, in seconds. `gamma`: the price of congestion.

    `earliest_s`: the least `wait_s + own_s` of any target.
    """

    cost_s: list[float]
    wait_s: array[float]
    own_s: array[float]
    gamma: float
    earliest_s: float


def per_token_s(seconds_per_token: float, context_tokens: int) -> float:
    """Seconds for a token of prefill on a target where sequences of so much context decode."""
    return seconds_per_token * (1 + CONTEXT_SLOPE * context_tokens)


def left_s(expected_s: float, elapsed_s: float) -> float:
    """Seconds that the running prefill still takes.

    One that is overdue is slower than predicted, or requests that are not known of go first: it is expected
    to take as long again as it is overdue. So a target that stands still looks worse with every second.
    """
    return max(abs(expected_s - elapsed_s), LEAST_LEFT * expected_s)


def cost_s(  # noqa: PLR0917  # on the hot path: keywords cost
    now: float,
    fixed_s: float,
    seconds_per_token: float,
    arrivals_per_s: float,
    charged: array[int],
    prompts: array[int],
    heads: array[int],
    context: array[int],
    began: array[float],
    own: array[int],
) -> Costs:
    """The columns are those of `Candidates`; there is at least one target.

    Each prompt takes `fixed_s` besides its tokens, also those that wait: of nearly cached ones that is most.
    """
    native = versions.chosen.columns
    if native is not None:
        found = native.cost_s(
            now, fixed_s, seconds_per_token, arrivals_per_s, CONTEXT_SLOPE, LEAST_LEFT, MOST_GAMMA,
            charged, prompts, heads, context, began, own,
        )  # fmt: skip
        return Costs(*found)
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
    costs = [wait + seconds * (1 + gamma) for wait, seconds in zip(waits, owns, strict=True)]
    return Costs(costs, waits, owns, gamma, min(map(add, waits, owns)))


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
