"""What an engine is: said by itself, shown by its events, told by flags; and the card made of it all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ops import TIERS
from kvrouter.core.wire.values import MOST_NAMES, MOST_TEXT_CHARACTERS
from kvrouter.worker.engines.endpoints import settled_feeds
from kvrouter.worker.engines.http import Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import FeedOptions

RANK_HEADER = "X-data-parallel-rank"
"""Taken by vLLM and by SGLang."""

_FIRST_TO_REPORT = (0, 24)
"""The first vLLM with `kv_cache_report_mode` (its pull request 45261, of June 2026; 0.23 has none)."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine said about itself at one time. 0 means unknown.

    `feeds` are its events by rank, none if it publishes none or does not tell. `tokenizer` is a directory
    or the name of a hub. `lacks` says what would make it serve better, each with how to get it.
    """

    models: Models
    version: str
    scrape: Scrape
    kind: str = "vllm"
    ranks: int = 1
    feeds: tuple[FeedOptions, ...] = ()
    max_batched_tokens: int = 0
    max_sequences: int = 0
    tokenizer: str = ""
    lacks: tuple[str, ...] = ()

    def with_scrape(self, scrape: Scrape) -> EngineFacts:
        """The same after a later look at the metrics; what they do not tell stays as it is known."""
        return replace(self, scrape=scrape.or_else(self.scrape))


def with_discovered(options: AgentOptions, facts: EngineFacts) -> AgentOptions:
    """The options, with what the engine tells where the flags are silent. Raises ConfigError."""
    feeds = settled_feeds(options, facts.feeds, facts.ranks)
    ranks = len(feeds) if options.feeds else facts.ranks
    return replace(options, feeds=feeds, ranks=max(options.ranks, ranks))


def build_card(
    options: AgentOptions,
    facts: EngineFacts,
    *,
    event_block_size: int,
    widest_tier: int,
    started_at_us: int,
    repairs_by_report: bool = False,
    notes: Sequence[str] = (),
) -> Card:
    """The card of an engine; `event_block_size`, `widest_tier` and `notes` are what its events have shown."""
    models, scrape = facts.models, facts.scrape
    return Card(
        worker_id=options.worker_id,
        url=(options.advertise_url or options.engine_url).rstrip("/"),
        model=options.model or models.served_names[0],
        served_names=models.served_names,
        lora_names=models.lora_names,
        max_loras=scrape.max_loras,
        block_size=_block_size(options, scrape, event_block_size),
        ranks=options.ranks,
        rank_header=RANK_HEADER if options.ranks > 1 else "",
        tiers=_tiers(scrape, widest_tier),
        max_model_len=models.max_model_len,
        max_batched_tokens=options.max_batched_tokens or facts.max_batched_tokens,
        max_sequences=options.max_sequences or facts.max_sequences,
        engine=facts.kind,
        engine_version=facts.version,
        labels=dict(options.labels),
        started_at_us=started_at_us,
        publishes_events=bool(options.feeds),
        repairs_by_report=repairs_by_report,
        notes=tuple(note[:MOST_TEXT_CHARACTERS] for note in notes)[:MOST_NAMES],
        prefix_caching=scrape.has_prefix_caching,
    )


def _block_size(options: AgentOptions, scrape: Scrape, event_block_size: int) -> int:
    """The larger of what the engine says of itself and what its events have shown; 0 if neither does.

    - The flag stands in for the metrics, which are those of the last look: another process of the engine is
      believed at once.
    - Events count from the beginning of the engine's process on (`KvPublisher.begin_life`), or those of the
      process before would contradict the new metrics, and no request of that size come to correct them.
    - They may show a larger size: vLLM's metrics name the blocks of one rank, its events those of a whole
      context-parallel group. They never lower it: KV groups with smaller blocks are announced as well, and a
      size that went to and fro with each event would change the card with it.
    """
    return max(options.block_size or scrape.block_size, event_block_size)


def _tiers(scrape: Scrape, widest_tier: int) -> dict[str, int]:
    capacities = {"device": scrape.device_blocks, "host": scrape.host_blocks, "disk": 0}
    widest = max(widest_tier, 1 if scrape.host_blocks else 0)
    return {name: capacities[name] for name in TIERS[: widest + 1]}


def can_report(options: AgentOptions, version: str, kind: str = "vllm") -> bool | None:
    """Whether requests may ask the engine for reports; None if its events' shape must tell."""
    if not options.kv_repair or kind == "sglang":
        return False
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) >= _FIRST_TO_REPORT if numbers else None
