"""Hand-overs from prefill to decode workers, and pulls from peers: how long they take, which pairs fail.

seconds of a transfer = LATENCY_S + seconds per token * tokens that the decode worker lacked
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from kvrouter.core.wire.ids import Target, WorkerId

# Of the step in which a decode worker takes a prompt over, and of the wire: 3 ms.
LATENCY_S = 0.003
# Until anything is measured: 128 KB a token at 25 GB/s, as if so many tokens had been handed over.
PRIOR_S, PRIOR_TOKENS = 5e-6 * 20_000, 20_000.0
DECAY = 0.99
# One that takes more than so many times what was expected is a stall of its decode worker rather than a slow
# wire, and counts as that much: a wire that has become slow is believed after a few dozen.
STALL_FACTOR = 3.0

# After so many failures in a row a pair is left alone for a while.
FAILURES_MOST = 3
REST_S = 60.0
# Pairs that are remembered: the oldest go first.
PAIRS_MOST = 4096


class Pull(Struct, frozen=True, gc=False):
    """Blocks that a target reads from a peer instead of computing them, as predicted."""

    source: Target
    blocks: int
    seconds: float
    copy_s: float
    """What the blocks that it evicts would be worth to later requests."""


class Transfers:
    """Learnt by this replica from first bytes at decode workers; faded sums."""

    def __init__(self) -> None:
        self._seconds, self._tokens = PRIOR_S, PRIOR_TOKENS
        self._failures: dict[tuple[WorkerId, WorkerId], tuple[int, float]] = {}

    def observe(self, seconds: float, tokens: int) -> None:
        """A decode worker's first byte came so long after it was asked."""
        if 0 <= seconds and tokens > 0:
            seconds = min(seconds, STALL_FACTOR * self.seconds(tokens))
            self._seconds = DECAY * self._seconds + max(0.0, seconds - LATENCY_S)
            self._tokens = DECAY * self._tokens + tokens

    def seconds(self, tokens: int) -> float:
        """Of a hand-over of so many tokens."""
        return LATENCY_S + tokens * self._seconds / self._tokens

    # Pairs that fail

    @property
    def has_failures(self) -> bool:
        """Whether any pair has failed that has not worked since."""
        return bool(self._failures)

    def failed(self, prefill: WorkerId, decode: WorkerId, now: float) -> None:
        """A request that was handed over failed at the decode worker."""
        pair = prefill, decode
        count = self._failures.pop(pair, (0, 0.0))[0] + 1
        self._failures[pair] = count, now + REST_S
        if len(self._failures) > PAIRS_MOST:
            del self._failures[next(iter(self._failures))]

    def worked(self, prefill: WorkerId, decode: WorkerId) -> None:
        self._failures.pop((prefill, decode), None)

    def rests(self, prefill: WorkerId, decode: WorkerId, now: float) -> bool:
        """Whether the pair has failed too often in a row, just now."""
        count, until = self._failures.get((prefill, decode), (0, 0.0))
        return count >= FAILURES_MOST and now < until

    def resting(self, now: float) -> list[tuple[WorkerId, WorkerId]]:
        """The pairs for which `rests` is true, prefill worker first."""
        return [pair for pair in self._failures if self.rests(*pair, now)]

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """Workers that are gone, or whose engines are others now."""
        gone = frozenset(workers)
        self._failures = {pair: one for pair, one in self._failures.items() if gone.isdisjoint(pair)}
