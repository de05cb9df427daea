"""Prometheus metrics of a frontend. Names start with `kvrouter_`; label sets are bounded by the fleet.

Counting is on the path of every request, reading is not. So counting adds to a plain number, and the families
of prometheus_client are built from these numbers when a client reads /metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvrouter.core.wire.ids import Target
from kvrouter.telemetry.catalog import METRIC_OF, METRICS

# Bucket bounds: from a cached prefill to the longest answer an operator lets run.
SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60,
    300, 900, 3600,
)  # fmt: skip


Values: TypeAlias = tuple[str | int, ...]
"""Of the labels of a series, in their order."""


class Count(Collector):
    """A counter, or one for each combination of the values of its labels.

    `born` returns the series that begin at 0 together with another one. One that begins at 1 shows no step
    to `rate` and `increase`.
    """

    def __init__(
        self, name: str, registry: CollectorRegistry, born: Callable[[Values], Iterable[Values]] | None = None
    ) -> None:
        self.values: defaultdict[Values, int] = defaultdict(int)
        self._name, self._born = name, born
        if not METRICS[name].labels:
            self.values[()] = 0
        registry.register(self)

    def inc(self, *values: str | int) -> None:
        self.values[values] += 1

    def collect(self) -> Iterable[Metric]:
        _, labels, text, _ = METRICS[self._name]
        family = CounterMetricFamily(self._name, text, labels=labels)
        counts = dict(self.values)
        begun = {born: 0 for values in counts for born in self._born(values)} if self._born else {}
        for values, count in (begun | counts).items():
            family.add_metric([str(value) for value in values], count)
        return [family]


class _Buckets:
    """Observations between each two bounds, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0


BETWEEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
"""Bounds for the time between two tokens, in seconds."""


class Spread(Collector):
    """A histogram, or one for each value of its label."""

    def __init__(self, name: str, registry: CollectorRegistry, *, bounds: Sequence[float] = SECONDS) -> None:
        self._name, self._labels = name, METRICS[name].labels
        self.bounds = tuple(bounds)
        self._spreads = defaultdict(lambda: _Buckets(self.bounds))
        if not self._labels:
            self._spreads[""] = _Buckets(bounds)
        registry.register(self)

    def observe(self, amount: float, value: str = "") -> None:
        """Count one; an amount equal to a bound belongs to the bucket below it, as `le` requires."""
        spread = self._spreads[value]
        spread.counts[bisect_left(self.bounds, amount)] += 1
        spread.sum += amount

    def counts(self) -> list[int]:
        """Observations up to each bound and above the last, not cumulative, over all values of the label."""
        columns = zip(*[spread.counts for spread in self._spreads.values()], strict=True)
        return [sum(column) for column in columns] or [0] * (len(self.bounds) + 1)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, METRICS[self._name].text, labels=self._labels)
        for value, spread in self._spreads.items():
            family.add_metric([value] if self._labels else [], self._cumulative(spread), spread.sum)
        return [family]

    def _cumulative(self, spread: _Buckets) -> list[tuple[str, float]]:
        buckets, below = [], 0
        for bound, count in zip((*self.bounds, float("inf")), spread.counts, strict=True):
            below += count
            buckets.append((_bound(bound), float(below)))
        return buckets


def _bound(bound: float) -> str:
    """A bound in the spelling of prometheus_client, as a changed label would be another series."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


# From a look-up to the tokens of the longest prompt.
STEP_SECONDS = (
    2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5
)  # fmt: skip
# Model names come from the workers' cards. Beyond this many, their requests are counted as `other`.
MOST_MODELS = 100
OTHER = "other"
# Targets that are gone are dropped at the next scrape; this bounds them where nothing scrapes.
MOST_TARGETS = 20_000


# Code and outcome of what alerts count.
_FAILURES = ((200, "broken"), (500, "failed"), (502, "failed"), (503, "failed"), (504, "failed"))


class BoundedLabels(dict[str, str]):
    """The label for each value: the value itself, and `other` for all but the first `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, value: str) -> str:
        if len(self) >= self._most:
            return OTHER
        self[value] = value
        return value


class TargetCounts:
    """What this replica has counted of the requests that it sent to one target."""

    __slots__ = ("answers", "first_byte_s", "first_bytes", "overlap_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.answers = dict.fromkeys(("ok", "refused", "failed", "broken", "left"), 0)
        """Attempts that ended, by outcome."""
        self.first_byte_s = 0.0
        """From the decision to the first byte, summed over `first_bytes` streamed answers."""
        self.first_bytes = 0
        self.prompt_tokens = 0
        """Of all requests placed there; of these `overlap_tokens` were predicted to be cached."""
        self.overlap_tokens = 0

    @property
    def errors(self) -> int:
        """Attempts that failed by the target's fault, or may have."""
        return self.answers["failed"] + self.answers["broken"]


class CountsByTarget(dict[Target, TargetCounts]):
    """The counts of each target; a new one has its own, in place of the oldest if there are too many."""

    def __missing__(self, target: Target) -> TargetCounts:
        if len(self) >= MOST_TARGETS:
            del self[next(iter(self))]
        found = self[target] = TargetCounts()
        return found


def _failures(values: Values) -> Iterator[Values]:
    """The failures that may follow on a route, of its model and before a model is known."""
    model, route, mode, *_ = values
    for failure in _FAILURES if route != OTHER else ():
        yield model, route, mode, *failure
        yield "", route, "", *failure


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.models = BoundedLabels(MOST_MODELS)
        """The label of each model."""
        self.targets = CountsByTarget()
        self.requests = Count("kvrouter_requests_total", registry, _failures)
        self.failed_attempts = Count("kvrouter_failed_attempts_total", registry)
        self.migrations = Count("kvrouter_migrations_total", registry)
        self.pd_requests = Count("kvrouter_pd_requests_total", registry)
        self.pd_pair_failures = Count("kvrouter_pd_pair_failures_total", registry)
        self.kv_transfer = Spread("kvrouter_kv_transfer_seconds", registry)
        self.removed_fields = Count("kvrouter_removed_fields_total", registry)
        self.token_ids_sent = Count("kvrouter_token_ids_sent_total", registry)
        self.tokens = Count("kvrouter_tokens_total", registry)
        self.first_byte = Spread("kvrouter_first_byte_seconds", registry)
        self.between = Spread("kvrouter_inter_token_seconds", registry, bounds=BETWEEN)
        self.duration = Spread("kvrouter_request_seconds", registry)
        self.queue_wait = Spread("kvrouter_queue_wait_seconds", registry)
        self.steps = Spread("kvrouter_step_seconds", registry, bounds=STEP_SECONDS)


Sample: TypeAlias = tuple[str, dict[str, str], float]
"""Its name (METRIC_OF), labels, and value. Buckets of a histogram are cumulative."""


class StateCollector(Collector):
    """Metrics read from the state at scrape time, so that no second count can differ from it."""

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self.samples = samples

    def collect(self) -> Iterable[Metric]:
        """One family per name, in the order of first samples."""
        families: dict[str, Metric] = {}
        for name, labels, value in self.samples():
            metric = METRIC_OF[name]
            family = families.get(metric)
            if family is None:
                one = METRICS[metric]
                family = families[metric] = Metric(metric.removesuffix("_total"), one.text, one.kind)
            family.add_sample(name, labels, value)
        return families.values()
