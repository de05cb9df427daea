"""What an engine is: asked of it over HTTP, shown by its events, told by flags; and its card."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from kvrouter.core.beats import Card
from kvrouter.core.events import TIERS
from kvrouter.worker.engine_http import EngineError, EngineHttp, Models
from kvrouter.worker.load import Scrape
from kvrouter.worker.options import AgentOptions

log = structlog.get_logger()

RANK_HEADER = "X-data-parallel-rank"
_LEARN_EVERY_S = 0.5
_SAY_EVERY_S = 10.0
_FIRST_TO_REPORT = (0, 24)
"""The first vLLM with `kv_cache_report_mode` (its pull request 45261, of June 2026; 0.23 has none)."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine said about itself at one time."""

    models: Models
    version: str
    scrape: Scrape


async def learn(engine: EngineHttp, options: AgentOptions) -> EngineFacts:
    """Ask the engine what it is. Raises EngineError."""
    models = await engine.models()
    try:
        scrape = await engine.scrape()
    except EngineError:
        if options.block_size is None:
            raise
        scrape = Scrape()
    if not (options.block_size or scrape.block_size):
        raise EngineError("/metrics tells no block size: give --kv-cache-block-size")
    return EngineFacts(models, await engine.version(), scrape)


async def learn_patiently(
    engine: EngineHttp, options: AgentOptions, stop: asyncio.Event
) -> EngineFacts | None:
    """Wait for the engine, saying so now and then; None if told to stop before it is up."""
    said_at = float("-inf")
    while not stop.is_set():
        try:
            return await learn(engine, options)
        except EngineError as error:
            if time.monotonic() - said_at >= _SAY_EVERY_S:
                said_at = time.monotonic()
                log.info("engine.awaited", url=options.engine_url, reason=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEARN_EVERY_S):
                await stop.wait()
    return None


def build_card(
    options: AgentOptions,
    facts: EngineFacts,
    *,
    block_size: int | None,
    widest_tier: int,
    started_at_us: int,
    repairs_by_report: bool = False,
    notes: Sequence[str] = (),
) -> Card:
    """The card of an engine; `block_size`, `widest_tier` and `notes` are what its events have shown."""
    models, scrape = facts.models, facts.scrape
    return Card(
        worker_id=options.worker_id,
        url=(options.advertise_url or options.engine_url).rstrip("/"),
        model=options.model or models.served_names[0],
        served_names=models.served_names,
        lora_names=models.lora_names,
        block_size=block_size or options.block_size or scrape.block_size,
        ranks=options.ranks,
        rank_header=RANK_HEADER if options.ranks > 1 else "",
        tiers=_tiers(scrape, widest_tier),
        max_model_len=models.max_model_len,
        max_batched_tokens=options.max_batched_tokens,
        max_sequences=options.max_sequences,
        engine="vllm",
        engine_version=facts.version,
        labels=dict(options.labels),
        started_at_us=started_at_us,
        publishes_events=bool(options.feeds),
        repairs_by_report=repairs_by_report,
        notes=tuple(notes),
    )


def _tiers(scrape: Scrape, widest_tier: int) -> dict[str, int]:
    capacities = {"device": scrape.device_blocks, "host": scrape.host_blocks, "disk": 0}
    widest = max(widest_tier, 1 if scrape.host_blocks else 0)
    return {name: capacities[name] for name in TIERS[: widest + 1]}


def can_report(options: AgentOptions, version: str) -> bool | None:
    """Whether requests may ask the engine for reports; None if its events' shape must tell."""
    if not options.kv_repair:
        return False
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) >= _FIRST_TO_REPORT if numbers else None
