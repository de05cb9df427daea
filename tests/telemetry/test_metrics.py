"""Metrics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.telemetry.metrics import (
    MOST_TARGETS,
    SECONDS,
    BoundedLabels,
    RequestMetrics,
    Sample,
    StateCollector,
)


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        sample.name + str(dict(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_names() -> None:
    """Every metric of requests carries our prefix, and can be scraped before the first request."""
    registry = CollectorRegistry()
    RequestMetrics(registry)

    assert all(name.startswith("kvrouter_") for name in scraped(registry))


def test_requests_by_labels() -> None:
    """Requests are counted by every label at once."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for code, outcome in ((200, "ok"), (200, "ok"), (200, "broken"), (503, "failed")):
        metrics.requests.values["m", "/v1/completions", "kv", code, outcome] += 1
    samples = scraped(registry)

    assert {("200", "ok"): 2, ("200", "broken"): 1, ("503", "failed"): 1} == {
        (code, outcome): samples[
            f"kvrouter_requests_total{{'code': '{code}', 'mode': 'kv', 'model': 'm', "
            f"'outcome': '{outcome}', 'route': '/v1/completions'}}"
        ]
        for code, outcome in (("200", "ok"), ("200", "broken"), ("503", "failed"))
    }


def test_failures_begin_at_0() -> None:
    """The first failure of a route is a step of its series, for its model and for none."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.requests.values["m", "/v1/completions", "kv", 503, "failed"] += 1
    metrics.requests.values["m", "/v1/completions", "kv", 200, "ok"] += 1
    counts = {
        (code, model): count
        for series, count in scraped(registry).items()
        for code in ("200', 'mode': 'kv", "502", "503")
        for model in ("m", "")
        if series.startswith(f"kvrouter_requests_total{{'code': '{code}")
        and f"'model': '{model}'" in series
        and "'outcome': 'ok'" not in series
    }

    assert {
        ("200', 'mode': 'kv", "m"): 0, ("502", "m"): 0, ("502", ""): 0, ("503", "m"): 1, ("503", ""): 0,
    } == counts  # fmt: skip


def test_models_are_bounded() -> None:
    """Models beyond the cap share one label; those before keep theirs."""
    models = BoundedLabels(2)

    assert ["a", "b", "other", "a", "other"] == [models[name] for name in ("a", "b", "c", "a", "d")]
    assert {"a", "b"} == set(models)


def test_targets_are_bounded() -> None:
    """Counts of targets that nothing scrapes do not grow without bound: the oldest are dropped."""
    metrics = RequestMetrics(CollectorRegistry())
    for number in range(MOST_TARGETS + 3):
        assert not metrics.targets[Target(WorkerId(f"w{number}"))].errors

    assert MOST_TARGETS == len(metrics.targets)
    assert Target(WorkerId("w2")) not in metrics.targets


def test_buckets() -> None:
    """Buckets ascend, from a cached prefill to an hour."""
    assert list(SECONDS) == sorted(set(SECONDS))
    assert (0.005, 3600) == (SECONDS[0], SECONDS[-1])


def test_state_is_read_at_scrape_time() -> None:
    """State is read at each scrape; removed items disappear."""
    registry = CollectorRegistry()
    workers = {"w1": 3.0, "w2": 4.0}

    def samples() -> Iterator[Sample]:
        for worker, blocks in workers.items():
            yield "kvrouter_target_blocks", {"worker": worker}, blocks
        yield "kvrouter_replicas", {}, 7.0

    registry.register(StateCollector(samples))
    before = scraped(registry)
    del workers["w1"]
    after = scraped(registry)

    assert {
        "kvrouter_target_blocks{'worker': 'w1'}": 3,
        "kvrouter_target_blocks{'worker': 'w2'}": 4,
        "kvrouter_replicas{}": 7,
    } == before
    assert "kvrouter_target_blocks{'worker': 'w1'}" not in after


def test_histogram_with_negative_bounds() -> None:
    """Buckets of a signed error are unchanged; Prometheus wants no sum and count for them."""
    registry = CollectorRegistry()
    bounds = {"-1": 2.0, "0": 5.0, "1": 5.0, "+Inf": 6.0}
    registry.register(
        StateCollector(
            lambda: [
                ("kvrouter_prediction_error_blocks_bucket", {"worker": "w", "le": bound}, count)
                for bound, count in bounds.items()
            ]
        )
    )
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())

    assert "histogram" == family.type
    assert bounds == {sample.labels["le"]: sample.value for sample in family.samples}
    assert {"kvrouter_prediction_error_blocks_bucket"} == {sample.name for sample in family.samples}


def test_label_values_are_escaped() -> None:
    """Quotes and line ends in a label are escaped."""
    registry = CollectorRegistry()
    odd = 'a"b\\c\nd'
    registry.register(StateCollector(lambda: [("kvrouter_feed_live", {"feed": odd}, 1.0)]))
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())

    assert odd == family.samples[0].labels["feed"]


def test_two_registries() -> None:
    """Two replicas in one process count separately."""
    one, two = CollectorRegistry(), CollectorRegistry()
    RequestMetrics(one).pd_pair_failures.inc()
    RequestMetrics(two)

    name = "kvrouter_pd_pair_failures_total{}"
    assert (1, 0) == (scraped(one)[name], scraped(two)[name])
