"""How fast targets prefill, learnt from streamed requests, to predict the end of those not streamed.

rate  = charged tokens when it was booked, its own included / (first data byte - sent)
time  = charged tokens / median of the target's last 32 rates; of the pool's last 512 where it has none
peak  = the best of the target's last 32 rates; the pool's best where it has none (mode sticky)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from kvrouter.core.wire.ids import Target

SAMPLES = 32
POOL_SAMPLES = 512
"""Of all targets together: enough for a median, and few enough to sort for a request."""
MIN_SECONDS = 1e-4
"""Shorter than this is a measurement of the loop, not of a prefill."""


class PrefillRates:
    """Tokens per second, per target."""

    def __init__(self) -> None:
        self._samples: dict[Target, deque[float]] = {}
        self._peaks: dict[Target, float] = {}
        self._unpeaked: set[Target] = set()
        """Those with newer samples than their peak."""
        self._latest: deque[tuple[Target, float]] = deque(maxlen=POOL_SAMPLES)
        self._pool_median: float | None = None
        """Of the latest; None: to be reckoned."""

    def observe(self, target: Target, charged_tokens: int, seconds: float) -> None:
        """A streamed request with this much charged before it got its first data byte after `seconds`."""
        if charged_tokens > 0 and seconds >= MIN_SECONDS:
            samples = self._samples.get(target)
            if samples is None:
                samples = self._samples[target] = deque(maxlen=SAMPLES)
            rate = charged_tokens / seconds
            samples.append(rate)
            self._latest.append((target, rate))
            self._pool_median = None
            self._unpeaked.add(target)

    def seconds(self, target: Target, charged_tokens: int) -> float | None:
        """How long a prefill behind this much will take; None without any sample."""
        samples = self._samples.get(target)
        if samples:
            return charged_tokens / median(samples)
        if not self._latest:
            return None
        if self._pool_median is None:
            self._pool_median = median(rate for _, rate in self._latest)
        return charged_tokens / self._pool_median

    def peaks(self, targets: Sequence[Target]) -> list[float | None]:
        """The fastest that each has been seen to prefill lately, in tokens per second.

        The pool's fastest where it has no sample; None without any.
        """
        self._peaks.update({target: max(self._samples[target]) for target in self._unpeaked})
        self._unpeaked.clear()
        fastest = max(self._peaks.values(), default=None)
        return [self._peaks.get(target, fastest) for target in targets]

    def forget(self, target: Target) -> None:
        """The target is gone."""
        if self._samples.pop(target, None) is not None:
            self._latest = deque((one for one in self._latest if one[0] != target), maxlen=POOL_SAMPLES)
            self._pool_median = None
        self._peaks.pop(target, None)
        self._unpeaked.discard(target)
