"""The seconds until each target would send a first byte: what weight `auto` of mode kv compares.

    the target's queue:   [ head ▓▓▓▓░░░ ][ next ][ next ]   +   [ own uncached tokens ]
                            done ┘  └──── wait_s ───────┘          └──── own_s ──────┘

    cost_s = wait_s + own_s * (1 + gamma)

The derivation is in docs/concepts/decide.md. The C version is `cost_s` of core/native/columns.pyx.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from statistics import median_low

from msgspec import Struct

from kvrouter.core.native import versions
from kvrouter.core.tables.prefill_speeds import CONTEXT_SLOPE

# A head that should have ended just now still takes its last step.
LEAST_LEFT = 0.02
# Under overload the wait says more about the queue than about the request, so its price is bounded.
MOST_GAMMA = 8.0


class Costs(Struct, frozen=True):
    """What a request would take on each target, in seconds. `gamma`: the price of congestion."""

    cost_s: list[float]
    wait_s: Sequence[float]
    own_s: Sequence[float]
    gamma: float


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
    seconds_per_token: float,
    arrivals_per_s: float,
    charged: array[int],
    heads: array[int],
    context: array[int],
    began: array[float],
    own: array[int],
) -> Costs:
    """The columns are those of `Candidates`; there is at least one target."""
    native = versions.chosen.columns
    if native is not None:
        limits = CONTEXT_SLOPE, LEAST_LEFT, MOST_GAMMA
        return Costs(
            *native.cost_s(
                now, seconds_per_token, arrivals_per_s, *limits, charged, heads, context, began, own
            )
        )
    waits, owns = array("d"), array("d")
    for i, charged_tokens in enumerate(charged):
        per_token = per_token_s(seconds_per_token, context[i])
        wait = 0.0
        if charged_tokens > 0:
            wait = left_s(heads[i] * per_token, now - began[i]) + (charged_tokens - heads[i]) * per_token
        waits.append(wait)
        owns.append(own[i] * per_token)
    # One more second of work here delays the requests that arrive while it waits. The median, because a mean
    # follows the one target that every request wants.
    gamma = min(MOST_GAMMA, arrivals_per_s / len(waits) * median_low(waits))
    costs = [wait + seconds * (1 + gamma) for wait, seconds in zip(waits, owns, strict=True)]
    return Costs(costs, waits, owns, gamma)
