"""What was found out about an engine, and what is missing, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.serve.tokenizers import Tokenizer
from kvrouter.worker.engines.facts import EngineFacts, with_discovered
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import FeedOptions


def report(
    options: AgentOptions, facts: EngineFacts, tokenizer: Tokenizer, *, no_events: str = ""
) -> Iterator[str]:
    """The lines of one engine's block. `no_events` says why the frontends do not use events, if so."""
    settled, models, scrape = with_discovered(options, facts), facts.models, facts.scrape
    loras = f", LoRA: {', '.join(models.lora_names)}" if models.lora_names else ""
    block_size = options.block_size or scrape.block_size
    capacity = f"{scrape.device_blocks:,} ({scrape.device_blocks * block_size:,} tokens)"
    host = f", {scrape.host_blocks:,} in host memory" if scrape.host_blocks else ""
    yield f"engine {options.worker_id} at {options.engine_url}: {facts.kind} {facts.version}".rstrip()
    yield f"  model       {options.model or ', '.join(models.served_names)}{loras}"
    yield f"  block size  {block_size} tokens"
    yield f"  blocks      {capacity if scrape.device_blocks else 'unknown'}{host}"
    yield f"  ranks       {settled.ranks}"
    unused = f" (not used: {no_events})" if no_events else ""
    shown = ", ".join(_shown(feed) for feed in settled.feeds)
    yield f"  events      {shown + unused if shown else 'none: placed by load'}"
    if settled.feeds:
        yield f"  replay      {', '.join(feed.replay for feed in settled.feeds if feed.replay) or 'none'}"
    yield f"  tokenizer   {tokenizer.shown}"
    for lack in (*facts.lacks, tokenizer.lack):
        if lack:
            yield f"  ! {lack}"


def _shown(feed: FeedOptions) -> str:
    return f"{feed.events} (the engine connects to it)" if "*" in feed.events else feed.events
