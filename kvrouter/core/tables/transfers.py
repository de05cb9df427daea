"""Hand-overs from prefill to decode workers, and pulls from peers: how long they take, which pairs fail.

seconds of a transfer = LATENCY_S + seconds per token * tokens that the worker lacked
seconds per token     = sums of those that are over; with those under way, so far, if that is more

On a slow wire the first transfers end long after dozens of others have begun: those under way show it sooner.
Only reads from peers are noted as such. Hand-overs were tried: first tokens came sooner on a slow wire, and
fewer answers in time, as more prompts were computed between the tokens of others.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from kvrouter.core.wire.ids import BookingKey, Target, WorkerId

# Of the step in which a decode worker takes a prompt over, and of the wire: 3 ms.
LATENCY_S = 0.003
# Until anything is measured: 128 KB a token at 25 GB/s, as if so many tokens had been handed over.
PRIOR_S, PRIOR_TOKENS = 5e-6 * 20_000, 20_000.0
DECAY = 0.99
# One that takes more than so many times what was expected is a stall of its decode worker rather than a slow
# wire, and counts as that much: a wire that has become slow is believed after a few dozen.
STALL_FACTOR = 3.0
# Until so many are measured, reading from peers waits for the one that is under way.
FEW = 4
# A wire too slow to be used is measured by nobody: after so long one transfer is tried as if it were not.
FORGOTTEN_S = 60.0

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
        # by booking: when it began, and its tokens; with the sums of both
        self._running: dict[BookingKey, tuple[float, int]] = {}
        self._began_s, self._running_tokens = 0.0, 0
        self._measured, self._measured_at = 0, 0.0
        self._failures: dict[tuple[WorkerId, WorkerId], tuple[int, float]] = {}

    def begin(self, key: BookingKey, tokens: int, at: float) -> None:
        """The worker of this booking begins to read so many tokens. `end` must follow."""
        self.end(key)
        self._running[key] = at, tokens
        self._began_s += at
        self._running_tokens += tokens

    def end(self, key: BookingKey) -> None:
        """It has its first output, or has failed; a second call changes nothing."""
        at, tokens = self._running.pop(key, (0.0, 0))
        self._began_s = self._began_s - at if self._running else 0.0  # else roundings would add up
        self._running_tokens -= tokens

    def observe(self, seconds: float, tokens: int, now: float) -> None:
        """A worker's first byte came so long after it was asked; before `end`."""
        if 0 <= seconds and tokens > 0:
            seconds = min(seconds, STALL_FACTOR * self.seconds(tokens, now))
            self._measured += 1
            self._measured_at = now
            self._seconds = DECAY * self._seconds + max(0.0, seconds - LATENCY_S)
            self._tokens = DECAY * self._tokens + tokens

    def seconds(self, tokens: int, now: float) -> float:
        """Of a transfer of so many tokens that begins now."""
        each_s = self._seconds / self._tokens
        if self._running:
            so_far_s = len(self._running) * (now - LATENCY_S) - self._began_s
            each_s = max(each_s, (self._seconds + so_far_s) / (self._tokens + self._running_tokens))
        elif now - self._measured_at > FORGOTTEN_S:
            each_s = min(each_s, PRIOR_S / PRIOR_TOKENS)
        return LATENCY_S + tokens * each_s

    @property
    def is_tried(self) -> bool:
        """Whether the wire is not known yet, and one transfer is under way to find out."""
        return self._measured < FEW and bool(self._running)

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
