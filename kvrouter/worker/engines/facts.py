"""What is known of an engine (its own reports, its events, the flags), and the card made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrouter.core.wire.heartbeats import BOTH, Card
from kvrouter.core.wire.ops import TIERS
from kvrouter.core.wire.values import MOST_NAMES, MOST_NUMBER, MOST_TEXT_CHARACTERS
from kvrouter.version import __version__
from kvrouter.worker.engines.endpoints import noted, settled_endpoints
from kvrouter.worker.engines.http import Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints

# vLLM and SGLang both read it.
RANK_HEADER = "X-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine reported about itself at one time. 0 means unknown.

    `endpoints` has its events by rank; empty if it publishes none or does not report them. `tokenizer` is a
    directory or a name on a hub. `lacks` names missing settings, each with the flag that adds it.
    `assumed_block_size` counts as long as neither a flag, nor the metrics, nor an event shows the size.
    `has_metrics`: its metrics say something of its load or its blocks. `takes_token_ids`: see Card.
    `takes_text`: it has a tokenizer, and takes more than token ids. `role`, `kv_connector`, `kv_engine_ids`,
    `bootstrap_port`: see Card.
    """

    models: Models
    version: str
    scrape: Scrape
    kind: str = "vllm"
    ranks: int = 1
    endpoints: tuple[EventEndpoints, ...] = ()
    max_batched_tokens: int = 0
    max_sequences: int = 0
    tokenizer: str = ""
    lacks: tuple[str, ...] = ()
    assumed_block_size: int = 0
    has_metrics: bool = True
    takes_token_ids: bool = False
    takes_text: bool = True
    role: str = BOTH
    kv_connector: str = ""
    kv_engine_ids: tuple[str, ...] = ()
    bootstrap_port: int = 0

    def block_size(self, options: AgentOptions, event_block_size: int = 0) -> int:
        """The larger of the engine's own size and that of its events.

        - The flag replaces the size in the metrics. The metrics are those of the last scrape, so the size of
          a restarted engine counts at once.
        - Events count from the start of the engine's process (`KvPublisher.begin_life`). A larger size from
          an earlier process would otherwise stay, and no later event could correct it.
        - Events may raise the size: vLLM's metrics give the blocks of one rank, its events those of a whole
          context-parallel group. They never lower it: an engine also announces KV groups with smaller blocks,
          and a size that changed with every event would publish a new card each time.
        """
        own = options.block_size or self.scrape.block_size
        return max(own, event_block_size) or self.assumed_block_size

    def with_scrape(self, scrape: Scrape) -> EngineFacts:
        """The facts after a later scrape; values that it lacks stay as they are known."""
        return replace(self, scrape=scrape.or_else(self.scrape))


def with_discovered(options: AgentOptions, facts: EngineFacts) -> AgentOptions:
    """The options, completed by what the engine reports. Raises ConfigError."""
    endpoints = settled_endpoints(options, facts.endpoints, facts.ranks)
    ranks = len(endpoints) if options.endpoints else facts.ranks
    return replace(options, endpoints=endpoints, ranks=max(options.ranks, ranks))


def build_card(
    options: AgentOptions,
    facts: EngineFacts,
    *,
    event_block_size: int,
    widest_tier: int,
    lookahead: int = 0,
    started_at_us: int,
    notes: Sequence[str] = (),
) -> Card:
    """The card of an engine. Its events have shown sizes, tiers, `lookahead` and `notes`.

    Its notes begin with what the engine lacks for its events.
    """
    models, scrape = facts.models, facts.scrape
    notes = [*noted(facts.lacks), *notes]
    return Card(
        worker_id=options.worker_id,
        url=(options.advertise_url or options.engine_url).rstrip("/"),
        model=options.model or models.served_names[0],
        served_names=models.served_names,
        lora_names=models.lora_names,
        max_loras=scrape.max_loras,
        block_size=facts.block_size(options, event_block_size),
        ranks=options.ranks,
        rank_header=RANK_HEADER if options.ranks > 1 else "",
        tiers=_tiers(scrape, widest_tier),
        max_model_len=models.max_model_len,
        max_batched_tokens=options.max_batched_tokens or facts.max_batched_tokens,
        max_sequences=options.max_sequences or facts.max_sequences,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        engine=facts.kind,
        engine_version=facts.version,
        labels=dict(options.labels),
        started_at_us=started_at_us,
        publishes_events=bool(options.endpoints),
        # within the limits of a card: frontends reject a larger one
        notes=tuple(note[:MOST_TEXT_CHARACTERS] for note in notes)[:MOST_NAMES],
        prefix_caching=scrape.has_prefix_caching,
        speculates=scrape.speculates and not lookahead,  # with a lookahead no block is dropped
        lookahead=lookahead,
        takes_token_ids=facts.takes_token_ids,
        engine_started_at_us=min(round(scrape.started_s * 1e6), MOST_NUMBER),
        tokenizer=facts.tokenizer if facts.tokenizer.isprintable() and len(facts.tokenizer) <= 1024 else "",
        agent_version=__version__,
        role=facts.role,
        kv_connector=facts.kv_connector,
        bootstrap_port=options.bootstrap_port or facts.bootstrap_port,
        kv_address=options.kv_address,
        kv_hash=options.kv_hash,
        kv_engine_ids=facts.kv_engine_ids,
    )


def _tiers(scrape: Scrape, widest_tier: int) -> dict[str, int]:
    capacities = {"device": scrape.device_blocks, "host": scrape.host_blocks, "disk": 0}
    # a host tier with a capacity exists before the first event names it
    widest = max(widest_tier, 1 if scrape.host_blocks else 0)
    return {name: capacities[name] for name in TIERS[: widest + 1]}
