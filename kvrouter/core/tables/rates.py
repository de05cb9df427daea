"""How fast targets prefill: measured on streamed requests, to predict the end of prefill of all others.

rate  = charged tokens as of the booking, including its own / (first data byte - sent)
time  = charged tokens / median of the target's last 32 rates; without any, of the pool's last 512
peak  = the highest of the target's last 32 rates; without any, of the pool's (mode sticky)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from kvrouter.core.wire.ids import Target

SAMPLES = 32
# of all targets together: enough for a median, and few enough to sort during a request
POOL_SAMPLES = 512
# a shorter time measures the event loop and not a prefill
MIN_SECONDS = 1e-4


class PrefillRates:
    """Tokens per second, per target."""

    def __init__(self) -> None:
        self._samples: dict[Target, deque[float]] = {}
        self._peaks: dict[Target, float] = {}
        self._unpeaked: set[Target] = set()  # targets whose samples are newer than their peak
        self._latest: deque[tuple[Target, float]] = deque(maxlen=POOL_SAMPLES)
        # Not there, and None: not computed since the last sample.
        self._medians: dict[Target, float] = {}
        self._pool_median: float | None = None

    def observe(self, target: Target, charged_tokens: int, seconds: float) -> None:
        """Record a streamed request: its first data byte came `seconds` after it was sent."""
        if charged_tokens > 0 and seconds >= MIN_SECONDS:
            samples = self._samples.get(target)
            if samples is None:
                samples = self._samples[target] = deque(maxlen=SAMPLES)
            rate = charged_tokens / seconds
            samples.append(rate)
            self._latest.append((target, rate))
            self._medians.pop(target, None)
            self._pool_median = None
            self._unpeaked.add(target)

    def seconds(self, target: Target, charged_tokens: int) -> float | None:
        """The predicted time to prefill `charged_tokens`; None without any sample."""
        rate = self._medians.get(target)
        if rate is not None:
            return charged_tokens / rate
        samples = self._samples.get(target)
        if samples:
            self._medians[target] = rate = median(samples)
            return charged_tokens / rate
        if not self._latest:
            return None
        if self._pool_median is None:
            self._pool_median = median(rate for _, rate in self._latest)
        return charged_tokens / self._pool_median

    def peaks(self, targets: Sequence[Target]) -> list[float | None]:
        """Each target's highest recent rate, in tokens per second.

        The pool's highest for a target without samples; None if no target has any.
        """
        self._peaks.update({target: max(self._samples[target]) for target in self._unpeaked})
        self._unpeaked.clear()
        fastest = max(self._peaks.values(), default=None)
        return [self._peaks.get(target, fastest) for target in targets]

    def forget(self, target: Target) -> None:
        if self._samples.pop(target, None) is not None:
            self._latest = deque((one for one in self._latest if one[0] != target), maxlen=POOL_SAMPLES)
            self._medians.pop(target, None)
            self._pool_median = None
        self._peaks.pop(target, None)
        self._unpeaked.discard(target)
