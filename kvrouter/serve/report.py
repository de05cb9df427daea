"""What was found out about an engine, and what is missing, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvrouter.worker.facts import EngineFacts, with_discovered
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq_feed import FeedOptions

NO_TOKENIZER = (
    "no tokenizer: {where}; give --model-path DIR, a directory with tokenizer.json. Until then texts and "
    "chats go by load, prompts as token ids by cache"
)


def report(options: AgentOptions, facts: EngineFacts, model_path: Path | str | None) -> Iterator[str]:
    """The lines of one engine's block. `model_path` is what the frontends tokenize with."""
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
    yield f"  events      {', '.join(_shown(feed) for feed in settled.feeds) or 'none: placed by load'}"
    if settled.feeds:
        yield f"  replay      {', '.join(feed.replay for feed in settled.feeds if feed.replay) or 'none'}"
    yield f"  tokenizer   {model_path or 'none'}"
    for lack in facts.lacks:
        yield f"  ! {lack}"
    if model_path is None:
        yield f"  ! {NO_TOKENIZER.format(where=_where(facts))}"


def tokenizer_of(facts: EngineFacts) -> Path | None:
    """The engine's tokenizer, if it is a directory on this machine."""
    path = Path(facts.tokenizer) if facts.tokenizer else None
    return path if path is not None and (path / "tokenizer.json").is_file() else None


def _shown(feed: FeedOptions) -> str:
    return f"{feed.events} (the engine connects to it)" if "*" in feed.events else feed.events


def _where(facts: EngineFacts) -> str:
    if not facts.tokenizer:
        return "the engine does not say where its model is from"
    return f"the engine's {facts.tokenizer!r} is no such directory on this machine"
