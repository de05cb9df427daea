"""What an engine's /metrics says: load per rank, block size and capacity, in vLLM's and SGLang's names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_LOADS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
}
_GAUGES = {
    "process_start_time_seconds": "started_s",
    "sglang:page_size": "block_size",
    "sglang:num_pages": "device_blocks",
    "sglang:max_total_num_tokens": "device_tokens",
    "sglang:hicache_host_total_tokens": "host_tokens",
}
_LABELS = {
    "vllm:cache_config_info": {
        "block_size": "block_size",
        "num_gpu_blocks": "device_blocks",
        "num_cpu_blocks": "host_blocks",
    },
    "sglang:cache_config_info": {"page_size": "block_size", "num_pages": "device_blocks"},
}
"""SGLang had them as labels until 0.5.10 and has the gauges above since."""

_WANTED = (*_LOADS, *_GAUGES, *_LABELS)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Requests running and waiting, and the fraction 0..1 of KV blocks in use; None: not reported."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look at an engine. 0 means unknown; `started_s` is the process's start since the epoch.

    `has_prefix_caching` is None where the engine does not tell.
    """

    loads: Mapping[int, RankLoad] = field(default_factory=dict)
    block_size: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    started_s: float = 0.0
    has_prefix_caching: bool | None = None

    def or_else(self, known: Scrape) -> Scrape:
        """As seen now, with what was not told this time taken from what is known."""
        return replace(
            self,
            block_size=self.block_size or known.block_size,
            device_blocks=self.device_blocks or known.device_blocks,
            host_blocks=self.host_blocks or known.host_blocks,
            has_prefix_caching=(
                known.has_prefix_caching if self.has_prefix_caching is None else self.has_prefix_caching
            ),
        )


def read_metrics(text: str) -> Scrape:
    """Read an exposition in Prometheus' text format. Raises ValueError if it is none.

    Only lines of the metrics above are parsed: the rest, histograms mostly, is a thousand lines.
    """
    wanted = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_WANTED))
    loads: defaultdict[int, dict[str, float]] = defaultdict(dict)
    values: dict[str, float] = {}
    has_prefix_caching = None
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            if sample.labels.get("priority") or not math.isfinite(sample.value):
                continue  # SGLang's share of one priority: the sample without one is the sum
            if sample.name in _LOADS:
                _raise_to(loads[_rank(sample)], _LOADS[sample.name], sample.value)
            elif sample.name in _GAUGES:
                _raise_to(values, _GAUGES[sample.name], sample.value)
            elif sample.name in _LABELS:
                has_prefix_caching = _PREFIX_CACHING.get(sample.labels.get("enable_prefix_caching", ""))
                for label, name in _LABELS[sample.name].items():
                    _raise_to(values, name, _number(sample.labels.get(label)))
    return _scrape({rank: _load(load) for rank, load in loads.items()}, values, has_prefix_caching)


_PREFIX_CACHING = {"True": True, "False": False}


def _raise_to(values: dict[str, float], name: str, value: float) -> None:
    """Keep the largest: the ranks' for a card, which has one number for all, and that of equal TP ranks."""
    values[name] = max(values.get(name, value), value)


def _rank(sample: Sample) -> int:
    """VLLM's `engine`, SGLang's `dp_rank`."""
    return _number(sample.labels.get("engine", sample.labels.get("dp_rank")))


def _load(values: Mapping[str, float]) -> RankLoad:
    running, waiting = values.get("running"), values.get("waiting")
    return RankLoad(
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        values.get("kv_usage"),
    )


def _scrape(
    loads: Mapping[int, RankLoad], values: Mapping[str, float], has_prefix_caching: bool | None
) -> Scrape:
    block_size = int(values.get("block_size", 0))
    tokens = {name: int(values.get(f"{name}_tokens", 0)) // (block_size or 1) for name in ("device", "host")}
    return Scrape(
        loads,
        block_size,
        int(values.get("device_blocks", 0)) or (tokens["device"] if block_size else 0),
        int(values.get("host_blocks", 0)) or (tokens["host"] if block_size else 0),
        values.get("started_s", 0.0),
        has_prefix_caching,
    )


def _number(text: str | None) -> int:
    """A label's number; 0 for what is none (vLLM writes "None")."""
    return int(text) if text is not None and text.isdecimal() else 0
