"""Prometheus metrics of a frontend. Names start with `kvrouter_`; label sets are bounded by the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
"""Bucket bounds: from a cached prefill to the longest answer an operator lets run."""


class RequestMetrics:
    """What happens to requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvrouter_requests", "Requests answered, by status", ["status"], registry=registry
        )
        self.failed_attempts = Counter(
            "kvrouter_failed_attempts",
            "Attempts that failed before their first byte, by status or `lost`",
            ["reason"],
            registry=registry,
        )
        self.cancelled = Counter(
            "kvrouter_cancelled_requests", "Requests whose client left", registry=registry
        )
        self.broken = Counter(
            "kvrouter_broken_streams", "Answers broken off after their first byte", registry=registry
        )
        self.in_flight = Gauge("kvrouter_requests_in_flight", "Requests being served here", registry=registry)
        self.prompt_tokens = Counter(
            "kvrouter_prompt_tokens", "Prompt tokens routed (0 where unknown)", registry=registry
        )
        self.overlap_tokens = Counter(
            "kvrouter_overlap_tokens", "Prompt tokens predicted to be cached", registry=registry
        )
        self.first_byte = Histogram(
            "kvrouter_first_byte_seconds",
            "Request received to first data byte, streamed requests",
            buckets=SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "kvrouter_request_seconds",
            "Request received to end of the answer",
            buckets=SECONDS,
            registry=registry,
        )
        self.tokenize = Histogram(
            "kvrouter_tokenize_seconds", "Template and tokenizer", buckets=SECONDS, registry=registry
        )


class QueueMetrics:
    """What happens to requests that have to wait for a worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.wait = Histogram(
            "kvrouter_queue_wait_seconds",
            "How long requests waited for a worker, by how it ended (admitted, timeout, left)",
            ["outcome"],
            buckets=SECONDS,
            registry=registry,
        )
        self.full = Counter(
            "kvrouter_queue_full", "Requests refused because too many waited", registry=registry
        )


Sample = tuple[str, Literal["gauge", "counter", "histogram"], str, dict[str, str], float]
"""`(name, kind, help, labels, value)`. A histogram comes as its buckets, cumulative, with the label `le`."""

SUFFIXES = {"gauge": "", "counter": "_total", "histogram": "_bucket"}


class StateCollector(Collector):
    """Turns what is asked at scrape time into metrics, so that nothing is counted twice."""

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self.samples = samples

    def collect(self) -> Iterable[Metric]:
        """One family per name, in order of first appearance."""
        families: dict[str, Metric] = {}
        for name, kind, text, labels, value in self.samples():
            family = families.get(name)
            if family is None:
                family = families[name] = Metric(name, text, kind)
            family.add_sample(name + SUFFIXES[kind], labels, value)
        return families.values()
