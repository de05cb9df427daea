"""How fast targets compute prompts: a line over all targets, for `--kv-overlap-score-weight auto`.

`PrefillRates` beside it keeps a rate for each target, whatever the mode.

    first byte ──> Service: tokens, seconds since max(sent, the target's previous first byte), context
                      │       tokens count as tokens · (1 + CONTEXT_SLOPE · context)
                      ├── all ──────────────────> Σ seconds, Σ tokens
                      └── LONG ones ────────────> Σ seconds, Σ tokens        each sample fades its sums: DECAY

    seconds per token = the lesser Σ seconds / Σ tokens of the two
    fixed seconds     = what all took beyond their tokens, per prompt

A prompt that is nearly all cached takes a step of the engine, however few its tokens are. While all prompts
are such ones, the ratio over all is many times the time of a token. Long prompts keep their own sums, so that
what they taught is still known then. The line goes through the mean of all: so a queue takes as long as such
prompts took.

Sums, and not a mean of ratios: two first bytes in one engine step share their seconds unevenly, and their sum
is still right. All replicas learn from all first bytes, since a booking's first byte travels (op FirstByte).

The error is kept, too: a rule that compares seconds is worth as much as its predictions of them.
Before the first sample, cards may state a speed (`assume`).
`Calibration` counts how these decisions did, for operators.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from msgspec import Struct

from kvrouter.core.tables.bookings import Service
from kvrouter.core.wire.ids import Target
from kvrouter.core.wire.ops import PrefillSpeed

# Per token that decoding sequences hold: reading a million of them slows prefill by 0.78 (an engine step of
# 1,024 tokens at 50 µs, and 40 ns per token of context).
CONTEXT_SLOPE = 7.8e-7
# The last 200 samples or so.
DECAY = 0.995
# Tokens that take as long as a step's fixed part, 5 to 20 ms, where a token takes 40 µs or more. With more,
# engines of mixed speed are used a little worse (docs/concepts/decide.md).
LONG = 256
# Until FEW samples: 20,000 tokens/s, or what cards state; as one prompt of 6,000 tokens.
PRIOR_S, PRIOR_TOKENS = 0.3, 6000.0
# Counted no further: the number travels.
MOST_SAMPLES = 1 << 40
# Samples until predictions are trusted; long ones, until the time of a token is theirs.
FEW = 8
# What a peer may have learnt: a second or 0.1 µs for a token. Beyond these it is not from an engine.
SLOWEST_S, FASTEST_S = 1.0, 1e-7
# Predictions that are off by more than the measured seconds are not used. In the simulator `auto` was still
# ahead of every fixed weight at 0.88 (engines that prefill four prompts at a time, at saturation).
MOST_ERROR = 1.0
# Upper bounds of predicted TTFT: ten classes, as deciles are. Fixed, so that the counts of replicas and of
# days can be added, as those of real deciles could not.
CLASSES_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, math.inf)
# Seconds that differ by less are equal: sums in another order.
EQUAL_S = 1e-9

# Rates kept of a target.
SAMPLES = 32
# Of all targets together: enough for a median, and few enough to sort during a request
POOL_SAMPLES = 512
# A shorter time measures the event loop and not a prefill
MIN_SECONDS = 1e-4


class Speed(Struct, frozen=True):
    """What was learnt, as of a moment: never changes, so a kept decision is explained with its own."""

    seconds_per_token: float = PRIOR_S / PRIOR_TOKENS
    samples: int = 0
    error: float = 0.0
    """The mean error of predicted prefill times, as a share of the measured ones."""
    is_stated: bool = False
    """Whether it began with what cards state."""
    fixed_s: float = 0.0
    """What a prompt takes besides its tokens; 0 until FEW long prompts were measured."""

    @property
    def doubt(self) -> str:
        """Why it should not be used; empty if it may."""
        if self.samples < FEW:
            return "" if self.is_stated else f"{self.samples} of {FEW} prefills measured"
        if self.error > MOST_ERROR:
            return f"predictions are off by {self.error:.0%}"
        return ""


@dataclass(slots=True)
class _Sums:
    """Seconds and tokens of prefills, each sample fading the earlier ones."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float) -> None:
        self.seconds = DECAY * self.seconds + seconds
        self.tokens = DECAY * self.tokens + tokens

    def per_token_s(self, prior_s: float = 0.0, prior_tokens: float = 0.0) -> float:
        return (self.seconds + prior_s) / (self.tokens + prior_tokens)


class PrefillSpeeds:
    """Learns `speed` from measured prefills."""

    def __init__(self) -> None:
        self.speed = Speed()
        self.doubt = self.speed.doubt
        self._prior_s = PRIOR_S
        self._is_stated = False
        self._all, self._long = _Sums(), _Sums()
        self._long_samples = 0
        self._off_s = 0.0

    def assume(self, tokens_per_s: Sequence[int]) -> None:
        """Begin with what the cards of the targets state, if anything. It counts until FEW samples."""
        stated = [1 / one for one in tokens_per_s if one and FASTEST_S <= 1 / one <= SLOWEST_S]
        if stated:
            self._prior_s = PRIOR_TOKENS * sum(stated) / len(stated)
            self._is_stated = True
            self._settle(self.speed.samples)

    def learn(self, service: Service) -> None:
        """A prefill has ended."""
        tokens = service.tokens * (1 + CONTEXT_SLOPE * service.context_tokens)
        self._off_s = DECAY * self._off_s + abs(service.seconds - self._predicted_s(service, tokens))
        self._all.add(service.seconds, tokens)
        if service.tokens >= LONG:
            self._long.add(service.seconds, tokens)
            self._long_samples = min(self._long_samples + 1, MOST_SAMPLES)
        self._settle(self.speed.samples + 1)

    def op(self) -> PrefillSpeed | None:
        """For a snapshot: what a joiner begins with; None if nothing was measured."""
        if not self.speed.samples:
            return None
        return PrefillSpeed(
            *_rounded(self._all),
            round(self._off_s * 1e6),
            self.speed.samples,
            *_rounded(self._long),
            self._long_samples,
        )

    def adopt(self, op: PrefillSpeed) -> None:
        """Begin with what a peer has learnt, unless more is known here."""
        if op.samples <= self.speed.samples or not _is_plausible(op.us, op.tokens):
            return
        self._all, self._off_s = _Sums(op.us / 1e6, float(op.tokens)), op.off_us / 1e6
        if op.long_samples > self._long_samples and _is_plausible(op.long_us, op.long_tokens):
            self._long = _Sums(op.long_us / 1e6, float(op.long_tokens))
            self._long_samples = min(op.long_samples, MOST_SAMPLES)
        self._settle(op.samples)

    def _predicted_s(self, service: Service, tokens: float) -> float:
        """Of what was measured: the error of a first guess says nothing about later predictions."""
        if self.speed.samples >= FEW:
            return self.speed.fixed_s + tokens * self.speed.seconds_per_token
        return tokens * self._all.per_token_s() if self._all.tokens else service.seconds

    def _settle(self, samples: int) -> None:
        error = self._off_s / self._all.seconds if self._all.seconds else 0.0
        prior = (self._prior_s, PRIOR_TOKENS) if samples < FEW else (0.0, 0.0)
        per_token_s, fixed_s = self._all.per_token_s(*prior), 0.0
        if self._long_samples >= FEW:
            # the lesser: engines may have become faster since the last long prompts
            per_token_s = min(per_token_s, max(self._long.per_token_s(), FASTEST_S))
            weight = (1 - DECAY**samples) / (1 - DECAY)
            fixed_s = max(0.0, self._all.seconds - per_token_s * self._all.tokens) / weight
        self.speed = Speed(per_token_s, min(samples, MOST_SAMPLES), error, self._is_stated, fixed_s)
        self.doubt = self.speed.doubt  # each decision asks for it


def _rounded(sums: _Sums) -> tuple[int, int]:
    """In whole microseconds and tokens."""
    return round(sums.seconds * 1e6), round(sums.tokens)


def _is_plausible(us: int, tokens: int) -> bool:
    """Whether an engine may need this long for a token."""
    return bool(tokens) and FASTEST_S <= us / 1e6 / tokens <= SLOWEST_S


@dataclass(slots=True)
class TtftClass:
    """The measured requests whose TTFT was predicted within the bounds of a class."""

    requests: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0


@dataclass(slots=True)
class Calibration:
    """Decisions that compared seconds: against the earliest candidate, and against measured first bytes."""

    decisions: int = 0
    later: int = 0
    """Decisions for another target than the one with the least predicted TTFT."""
    later_s: float = 0.0
    """By how much, over all decisions."""
    classes: tuple[TtftClass, ...] = field(default_factory=lambda: tuple(TtftClass() for _ in CLASSES_S))
    """One for each bound of CLASSES_S."""

    def decided(self, chosen_s: float, least_s: float) -> None:
        """Count a decision: the predicted TTFT of the chosen target, and the least of any candidate."""
        self.decisions += 1
        if chosen_s - least_s > EQUAL_S:
            self.later += 1
            self.later_s += chosen_s - least_s

    def measured(self, predicted_s: float, measured_s: float) -> None:
        """Count a first byte."""
        one = self.classes[bisect_left(CLASSES_S, predicted_s)]
        one.requests += 1
        one.predicted_s += predicted_s
        one.measured_s += measured_s


class PrefillRates:
    """Tokens per second of each target, to predict when a prefill ends that is not measured.

    rate  = charged tokens as of the booking, including its own / (first data byte - sent)
    time  = charged tokens / median of the target's last 32 rates; without any, of the pool's last 512
    peak  = the highest of the target's last 32 rates; without any, of the pool's (mode sticky)
    """

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
