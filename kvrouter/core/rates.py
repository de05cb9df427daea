"""How fast targets prefill, learnt from streamed requests, to predict the end of those not streamed.

rate  = charged tokens when it was booked, its own included / (first data byte - sent)
time  = charged tokens / median of the target's last 32 rates; the pool's where it has none
peak  = the best of the target's last 32 rates; the pool's best where it has none (mode sticky)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from kvrouter.core.ids import Target

SAMPLES = 32
MIN_SECONDS = 1e-4
"""Shorter than this is a measurement of the loop, not of a prefill."""


class PrefillRates:
    """Tokens per second, per target."""

    def __init__(self) -> None:
        self._samples: dict[Target, deque[float]] = {}
        self._peaks: dict[Target, float] = {}

    def observe(self, target: Target, charged_tokens: int, seconds: float) -> None:
        """A streamed request with this much charged before it got its first data byte after `seconds`."""
        if charged_tokens > 0 and seconds >= MIN_SECONDS:
            samples = self._samples.setdefault(target, deque(maxlen=SAMPLES))
            samples.append(charged_tokens / seconds)
            self._peaks[target] = max(samples)

    def seconds(self, target: Target, charged_tokens: int) -> float | None:
        """How long a prefill behind this much will take; None without any sample."""
        samples = self._samples.get(target) or [s for own in self._samples.values() for s in own]
        return charged_tokens / median(samples) if samples else None

    def peaks(self, targets: Sequence[Target]) -> list[float | None]:
        """The fastest that each has been seen to prefill lately, in tokens per second.

        The pool's fastest where it has no sample; None without any.
        """
        fastest = max(self._peaks.values(), default=None)
        return [self._peaks.get(target, fastest) for target in targets]

    def forget(self, target: Target) -> None:
        """The target is gone."""
        self._samples.pop(target, None)
        self._peaks.pop(target, None)
