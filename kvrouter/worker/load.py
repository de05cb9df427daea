"""What an engine's /metrics says: load per rank, block size and capacity (vLLM's names)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

_FIELDS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}
_CACHE = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_WANTED = (*_FIELDS, _CACHE, _STARTED)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Requests running and waiting, and the fraction 0..1 of KV blocks in use; None: not reported."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look at an engine. 0 means unknown; `started_s` is the process's start since the epoch."""

    loads: Mapping[int, RankLoad] = field(default_factory=dict)
    block_size: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    started_s: float = 0.0


def read_metrics(text: str) -> Scrape:
    """Read an exposition in Prometheus' text format. Raises ValueError if it is none.

    Only lines of the metrics above are parsed: the rest, histograms mostly, is a thousand lines.
    """
    wanted = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_WANTED))
    scrape = Scrape()
    loads: dict[int, RankLoad] = {}
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            rank = _number(sample.labels.get("engine"))
            if sample.name in _FIELDS:
                load = loads.get(rank, RankLoad())
                loads[rank] = _with_value(load, _FIELDS[sample.name], sample.value)
            elif sample.name == _CACHE:
                scrape = _with_cache(scrape, sample.labels)
            elif sample.name == _STARTED:
                scrape = replace(scrape, started_s=sample.value)
    return replace(scrape, loads=loads)


def _with_value(load: RankLoad, name: str, value: float) -> RankLoad:
    if name == "kv_usage":
        return replace(load, kv_usage=value)
    return replace(load, running=int(value)) if name == "running" else replace(load, waiting=int(value))


def _with_cache(scrape: Scrape, labels: Mapping[str, str]) -> Scrape:
    """The largest of the ranks' capacities: a card has one number for all of them."""
    return replace(
        scrape,
        block_size=_number(labels.get("block_size")),
        device_blocks=max(scrape.device_blocks, _number(labels.get("num_gpu_blocks"))),
        host_blocks=max(scrape.host_blocks, _number(labels.get("num_cpu_blocks"))),
    )


def _number(text: str | None) -> int:
    """A label's number; 0 for what is none (vLLM writes "None")."""
    return int(text) if text is not None and text.isdecimal() else 0
