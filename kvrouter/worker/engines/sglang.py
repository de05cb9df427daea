"""SGLang's KV events: the wire and the array shape of vLLM up to 0.23, with less in them.

Read in SGLang's source (`disaggregation/kv_events.py`, `mem_cache/events.py`), not observed on an engine:
one BlockStored per page of its radix tree, page hashes are signed 64-bit integers, a node's removals come
parent first, a batch may lack its rank and a replay its topic. There are no extra keys and no LoRA names:
what SGLang keeps apart by salt or adapter looks alike here. With EAGLE the token ids are pairs, and
nothing can be named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import MOST_AMOUNT, Amount, BlockSize, Ranks, Text
from kvrouter.worker.engines.adapter import Sink
from kvrouter.worker.engines.endpoints import feed_lacks, read_config
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineError, EngineHttp, Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.engines.vllm import BlockStored, VllmAdapter
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import FeedOptions

EVENTS_OFF = (
    "events off: start SGLang with --kv-events-config "
    '\'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\''
)
CACHING_OFF = "prefix caching is off: start SGLang without --disable-radix-cache"
NO_METRICS = "load unknown, only this router's own requests count: start SGLang with --enable-metrics"
CACHED_TOKENS_UNKNOWN = (
    "cached_tokens unknown, so predictions cannot be checked: start SGLang with --enable-cache-report"
)
PAGE_SIZE_1 = (
    "page size 1 makes every token a block, far too many to publish and compare: "
    "start SGLang with --page-size 16 (or 32, 64)"
)
HEALTH_PATH = "v1/models"
"""SGLang's /health generates a token and takes a second: too slow, and too dear, for a probe a second."""


class ServerInfo(Struct, frozen=True):
    """The settings that matter here, of several hundred."""

    version: Text = ""
    model_path: Text = ""
    tokenizer_path: Text | None = None
    page_size: BlockSize | None = None
    max_total_num_tokens: Amount | None = None
    max_running_requests: Amount | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: Amount | None = None
    dp_size: Ranks = 1
    disable_radix_cache: bool = False
    enable_metrics: bool = False
    enable_cache_report: bool = False
    kv_events_config: str | dict[str, Any] | None = None

    @property
    def max_batched_tokens(self) -> int:
        """Prompt tokens in one step; a chunk of -1 means that prompts are not cut."""
        chunk = self.chunked_prefill_size or 0
        return chunk if 0 < chunk <= MOST_AMOUNT else self.max_prefill_tokens or 0


_decode_info = msgspec.json.Decoder(ServerInfo).decode


def read_server_info(body: bytes) -> ServerInfo:
    """Read /server_info. Raises EngineError."""
    try:
        return _decode_info(body)
    except UNREADABLE as error:
        raise EngineError(f"/server_info is not what SGLang answers: {error}") from None


async def learn_sglang(engine: EngineHttp, models: Models, options: AgentOptions) -> EngineFacts:
    """Ask /server_info and /metrics. Raises EngineError."""
    engine.health_path = HEALTH_PATH
    body = await engine.find("server_info") or await engine.find("get_server_info")
    if body is None:
        raise EngineError("neither /server_info nor /get_server_info is there, as SGLang has them")
    return _facts(read_server_info(body), models, await _scrape(engine), options)


async def _scrape(engine: EngineHttp) -> Scrape:
    try:
        return await engine.scrape()
    except EngineError:
        return Scrape()


def _facts(info: ServerInfo, models: Models, scrape: Scrape, options: AgentOptions) -> EngineFacts:
    block_size = scrape.block_size or info.page_size or options.block_size
    if block_size == 1:
        raise EngineError(PAGE_SIZE_1)
    if not block_size:
        raise EngineError("/server_info tells no page size: give --kv-cache-block-size")
    told = Scrape(
        block_size=block_size,
        device_blocks=(info.max_total_num_tokens or 0) // block_size,
        has_prefix_caching=not info.disable_radix_cache,
    )
    feeds = _feeds(info, urlsplit(options.engine_url).hostname or "")
    return EngineFacts(
        models,
        info.version,
        scrape.or_else(told),
        "sglang",
        ranks=max(info.dp_size, 1),
        feeds=feeds,
        max_batched_tokens=info.max_batched_tokens,
        max_sequences=info.max_running_requests or 0,
        tokenizer=info.tokenizer_path or info.model_path,
        lacks=tuple(_lacks(info, feeds, options)),
    )


def _feeds(info: ServerInfo, host: str) -> tuple[FeedOptions, ...]:
    config = info.kv_events_config
    if not config:
        return ()
    text = config if isinstance(config, str) else msgspec.json.encode(config).decode()
    return read_config(text, host, max(info.dp_size, 1))


def _lacks(info: ServerInfo, feeds: tuple[FeedOptions, ...], options: AgentOptions) -> Iterator[str]:
    if info.disable_radix_cache:
        yield CACHING_OFF
    if not feeds:
        yield EVENTS_OFF
    else:
        yield from feed_lacks(options, feeds, max(info.dp_size, 1))
    if not info.enable_metrics:
        yield NO_METRICS
    if not info.enable_cache_report:
        yield CACHED_TOKENS_UNKNOWN


PAGE_OF_ONE = "page size 1 is not indexed: start SGLang with --page-size 16 (or 32, 64)"


class SglangAdapter(VllmAdapter):
    """Tells a publisher what SGLang's events mean: vLLM's, but for its default page size of one token."""

    def _stored(self, event: BlockStored, sink: Sink) -> None:
        if event.block_size == 1:
            self.skipped.note(PAGE_OF_ONE)
        else:
            super()._stored(event, sink)
