"""Reads an engine's /metrics: load per rank, block size and capacity, in the names of several engines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.values import (
    MOST_AMOUNT,
    MOST_BLOCK_SIZE,
    MOST_FINITE,
    MOST_NAMES,
    MOST_NUMBER,
    MOST_RANKS,
    MOST_SHARE,
    MOST_TEXT_CHARACTERS,
)

# Lines of one exposition. 64 data-parallel ranks of vLLM have about 40,000.
MOST_LINES = 200_000
# Of a line that is parsed: prometheus_client's time grows with the square of the length of a line's labels.
MOST_LINE_CHARACTERS = 32 * 1024
# Of all lines that are parsed: about 0.1 s, in which the agent does nothing else.
MOST_PARSED_CHARACTERS = 512 * 1024

_LOADS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
    "trtllm_kv_cache_utilization": "kv_usage",
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
}
_GAUGES = {
    "process_start_time_seconds": "started_s",
    "sglang:page_size": "block_size",
    "sglang:num_pages": "device_blocks",
    "sglang:max_total_num_tokens": "device_tokens",
    "sglang:hicache_host_total_tokens": "host_tokens",
}
# SGLang had its block size and capacity as labels until 0.5.10, and has had the gauges above since.
_LABELS = {
    "vllm:cache_config_info": {
        "block_size": "block_size",
        "num_gpu_blocks": "device_blocks",
        "num_cpu_blocks": "host_blocks",
    },
    "sglang:cache_config_info": {"page_size": "block_size", "num_pages": "device_blocks"},
}

# 1 per state that holds: awake, weights_offloaded (sleep level 1), discard_all (level 2).
_SLEEP = "vllm:engine_sleep_state"

# vLLM's connectors to other engines, mostly between one that prefills and one that decodes.
_CONNECTORS = {"vllm:nixl_": "NixlConnector", "vllm:mooncake_xfer_": "MooncakeConnector"}

# Adapters as labels. The value is a time: of several samples the newest counts.
_LORAS = "vllm:lora_requests_info"

# Present from the start if speculative decoding is on, with any method.
_DRAFTS = "vllm:spec_decode_num_drafts_total"

# What an engine has done, since its start.
_COUNTED = re.compile(
    rb"^(?:vllm|sglang):(generation_tokens|request_success|num_requests)_total"
    rb"(?:\{[^\n]{0,4096}\})? ([0-9.e+]{1,30})\s*$",
    re.MULTILINE,
)

_WANTED = (*_LOADS, *_GAUGES, *_LABELS, _LORAS, _SLEEP, *_CONNECTORS, _DRAFTS)

# The largest value of each number that is not an amount. A value out of range counts as not reported.
_MOST = {"kv_usage": MOST_SHARE, "block_size": MOST_BLOCK_SIZE}
# int() of a longer text costs time that grows with the square of its length; 18 digits fit 64 bits.
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Requests running and waiting, and the fraction 0..1 of KV blocks in use; None: not reported.

    `metrics` are the additional series of --metric: report name -> value.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    waiting_loras: tuple[str, ...] = ()
    running_loras: tuple[str, ...] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def beat(self, rank: int, incarnation: int, seq: int, *, is_partial: bool) -> RankBeat:
        """The rank's part of a heartbeat."""
        return RankBeat(
            rank=rank,
            incarnation=incarnation,
            seq=seq,
            partial=is_partial,
            running=self.running,
            waiting=self.waiting,
            kv_usage=self.kv_usage,
            waiting_loras=self.waiting_loras,
            running_loras=self.running_loras,
            metrics=dict(self.metrics),
        )


@dataclass(frozen=True, slots=True)
class Scrape:
    """An engine's metrics at one time. 0 means unknown; `started_s` is its start in seconds since the epoch.

    `has_prefix_caching` is None if the engine does not report it. `is_asleep`: it serves nothing now, and its
    cache is empty. `kv_connector`: to other engines, as vLLM's configuration names it: it may be half of a
    prefill/decode pair. `speculates`: it decodes speculatively.
    """

    loads: Mapping[int, RankLoad] = field(default_factory=dict)
    block_size: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    started_s: float = 0.0
    has_prefix_caching: bool | None = None
    max_loras: int = 0
    is_asleep: bool = False
    kv_connector: str = ""
    speculates: bool = False

    def or_else(self, known: Scrape) -> Scrape:
        """The same scrape, with `known` in place of each value that it lacks."""
        return replace(
            self,
            block_size=self.block_size or known.block_size,
            device_blocks=self.device_blocks or known.device_blocks,
            host_blocks=self.host_blocks or known.host_blocks,
            has_prefix_caching=(
                known.has_prefix_caching if self.has_prefix_caching is None else self.has_prefix_caching
            ),
            max_loras=self.max_loras or known.max_loras,
            # several processes may answer in turn, each with its own start: the latest one stays
            started_s=max(self.started_s, known.started_s),
        )


@dataclass(frozen=True, slots=True)
class EngineWork:
    """What an engine has done since its start; None: it does not report it."""

    generated_tokens: float | None = None
    ended_requests: float | None = None

    def surely_filled(self, before: EngineWork, running: int, block_size: int) -> bool:
        """Whether the work since `before` has filled a block with generated tokens."""
        if None in (
            self.generated_tokens,
            before.generated_tokens,
            self.ended_requests,
            before.ended_requests,
        ):
            return False
        tokens = (self.generated_tokens or 0) - (before.generated_tokens or 0)
        requests = (self.ended_requests or 0) - (before.ended_requests or 0) + running
        return requests >= 0 and tokens > requests * block_size


NO_WORK = EngineWork()


def read_metrics(text: str, extra: Mapping[str, str] | None = None) -> Scrape:
    """Read an exposition in Prometheus' text format. `extra` has additional series: report name -> series.

    Raises ValueError if the text has another format or exceeds the limits above.
    """
    extra = extra or {}
    reading = _Samples(extra)
    # Only the wanted lines are parsed: the others, mostly histograms, are a thousand lines per scrape.
    for family in text_string_to_metric_families(_wanted(text, (*_WANTED, *extra.values()))):
        for sample in family.samples:
            if (_rank_named(sample) or 0) < MOST_RANKS:
                reading.take(sample)
    return reading.scrape()


def _wanted(text: str, starts: tuple[str, ...]) -> str:
    if text.count("\n") > MOST_LINES:
        raise ValueError(f"more than {MOST_LINES} lines")
    lines = [f"{line}\n" for line in text.split("\n") if line.startswith(starts)]
    if max(map(len, lines), default=0) > MOST_LINE_CHARACTERS:
        raise ValueError(f"a line of more than {MOST_LINE_CHARACTERS} characters")
    if sum(map(len, lines)) > MOST_PARSED_CHARACTERS:
        raise ValueError(f"more than {MOST_PARSED_CHARACTERS} characters about load and capacity")
    return "".join(lines)


def read_work(exposition: bytes) -> EngineWork:
    """Tokens and requests, of all ranks together."""
    sums: dict[bytes, float] = {}
    for name, number in _COUNTED.findall(exposition):
        try:
            sums[name] = sums.get(name, 0.0) + float(number)
        except ValueError:
            continue
    requests = sums.get(b"request_success", sums.get(b"num_requests"))
    return EngineWork(sums.get(b"generation_tokens"), requests)


class _Samples:
    """The values of the samples so far. Of several samples for one value the largest counts."""

    def __init__(self, extra: Mapping[str, str]) -> None:
        self._extra = extra
        self._loads: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._values: dict[str, float] = {}
        self._has_prefix_caching: bool | None = None
        # By rank. A sample without a rank (None) holds for all ranks.
        self._metrics: defaultdict[int | None, dict[str, float]] = defaultdict(dict)
        self._loras: dict[int | None, Sample] = {}
        self._is_asleep = self._speculates = False
        self._kv_connector = ""

    def take(self, sample: Sample) -> None:
        for name, series in self._extra.items():
            if sample.name == series:
                of_rank = self._metrics[_rank_named(sample)]
                _raise_to(of_rank, name, sample.value, least=-MOST_FINITE, most=MOST_FINITE)
        if sample.labels.get("priority"):
            return  # SGLang's part of one priority: the sample without a priority is the sum
        if sample.name in _LOADS:
            _raise_within(self._loads[_rank_named(sample) or 0], _LOADS[sample.name], sample.value)
        elif sample.name in _GAUGES:
            _raise_within(self._values, _GAUGES[sample.name], sample.value)
        elif sample.name in _LABELS:
            self._has_prefix_caching = _PREFIX_CACHING.get(sample.labels.get("enable_prefix_caching", ""))
            for label, name in _LABELS[sample.name].items():
                _raise_within(self._values, name, _number(sample.labels.get(label)))
        elif sample.name == _LORAS:
            self._take_loras(sample)
        elif sample.name == _SLEEP and sample.labels.get("sleep_state") == "awake":
            self._is_asleep |= sample.value == 0
        elif sample.name.startswith(tuple(_CONNECTORS)):
            self._kv_connector = next(name for of, name in _CONNECTORS.items() if sample.name.startswith(of))
        elif sample.name == _DRAFTS:
            self._speculates = True

    def _take_loras(self, sample: Sample) -> None:
        rank = _rank_named(sample)
        if rank not in self._loras or self._loras[rank].value <= sample.value:
            self._loras[rank] = sample
        _raise_within(self._values, "max_loras", _number(sample.labels.get("max_lora")))

    def scrape(self) -> Scrape:
        named = {*self._loads, *self._metrics, *self._loras}
        ranks = sorted(rank for rank in named if rank is not None) or ([0] if named else [])
        found = _scrape({rank: self._load(rank) for rank in ranks}, self._values, self._has_prefix_caching)
        return replace(
            found, is_asleep=self._is_asleep, kv_connector=self._kv_connector, speculates=self._speculates
        )

    def _load(self, rank: int) -> RankLoad:
        values, loras = self._loads.get(rank, {}), self._loras.get(rank, self._loras.get(None))
        running, waiting = values.get("running"), values.get("waiting")
        return RankLoad(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            kv_usage=values.get("kv_usage"),
            waiting_loras=_names(loras, "waiting_lora_adapters") if loras else (),
            running_loras=_names(loras, "running_lora_adapters") if loras else None,
            metrics={**self._metrics.get(None, {}), **self._metrics.get(rank, {})},
        )


_PREFIX_CACHING = {"True": True, "False": False}


def _raise_within(values: dict[str, float], name: str, value: float) -> None:
    _raise_to(values, name, value, least=0, most=_MOST.get(name, MOST_AMOUNT))


def _raise_to(values: dict[str, float], name: str, value: float, *, least: float, most: float) -> None:
    """Keep the largest value. A value out of range is ignored, also NaN: a heartbeat could not carry it."""
    # The largest, because a card has one number for all ranks, and tensor-parallel ranks report equal ones.
    if least <= value <= most:
        values[name] = max(values.get(name, value), value)


def _rank_named(sample: Sample) -> int | None:
    """The label `engine` (vLLM) or `dp_rank` (SGLang); None if the sample has neither."""
    label = sample.labels.get("engine", sample.labels.get("dp_rank"))
    return None if label is None else _number(label)


def _names(sample: Sample, label: str) -> tuple[str, ...]:
    names = (name.strip() for name in sample.labels.get(label, "").split(","))
    return tuple(name for name in names if 0 < len(name) <= MOST_TEXT_CHARACTERS)[:MOST_NAMES]


def _scrape(
    loads: Mapping[int, RankLoad], values: Mapping[str, float], has_prefix_caching: bool | None
) -> Scrape:
    block_size = int(values.get("block_size", 0))
    tokens = {name: int(values.get(f"{name}_tokens", 0)) // (block_size or 1) for name in ("device", "host")}
    return Scrape(
        loads=loads,
        block_size=block_size,
        device_blocks=int(values.get("device_blocks", 0)) or (tokens["device"] if block_size else 0),
        host_blocks=int(values.get("host_blocks", 0)) or (tokens["host"] if block_size else 0),
        started_s=values.get("started_s", 0.0),
        has_prefix_caching=has_prefix_caching,
        max_loras=int(values.get("max_loras", 0)),
    )


def _number(text: str | None) -> int:
    """A label's number; 0 if it has none (vLLM writes "None"), out of every range if it is too long."""
    if text is None or not text.isdecimal():
        return 0
    return int(text) if len(text) <= _MOST_DIGITS else MOST_NUMBER
