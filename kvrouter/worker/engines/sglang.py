"""SGLang: its KV events, and what the engine reports about itself.

The events use the wire and the array shape of vLLM up to 0.23, with fewer fields. This was read in SGLang's
source (`disaggregation/kv_events.py`, `mem_cache/events.py`), not observed on an engine: one BlockStored per
page of its radix tree; page hashes are signed 64-bit integers; a node's removals come parent first; a batch
may lack its rank and a replay its topic. There are no extra keys and no LoRA names, so blocks that SGLang
separates by salt or adapter look alike here. With EAGLE the token ids are pairs, and no block can be named.

SGLang reports its settings at /server_info (older versions at /get_server_info), its API keys among them:
only the fields below are read. /metrics exists only with --enable-metrics.
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
from kvrouter.worker.engines.endpoints import endpoint_lacks, read_config
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineError, EngineHttp, Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.engines.vllm import BlockStored, VllmAdapter
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints

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
# SGLang's /health generates a token and takes a second: too slow and too costly for one probe per second.
HEALTH_PATH = "v1/models"


class ServerInfo(Struct, frozen=True):
    """The settings that the agent uses, out of several hundred."""

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
        """Prompt tokens in one step. A chunk size of -1 means that prompts are not chunked."""
        chunk = self.chunked_prefill_size or 0
        return chunk if 0 < chunk <= MOST_AMOUNT else self.max_prefill_tokens or 0


_decode_info = msgspec.json.Decoder(ServerInfo).decode


def read_server_info(body: bytes) -> ServerInfo:
    """Read /server_info. Raises EngineError."""
    try:
        return _decode_info(body)
    except UNREADABLE as error:
        raise EngineError(f"/server_info is not in SGLang's format: {error}") from None


async def learn_sglang(engine: EngineHttp, models: Models, options: AgentOptions) -> EngineFacts:
    """Ask /server_info and /metrics. Raises EngineError."""
    engine.health_path = HEALTH_PATH
    body = await engine.find("server_info") or await engine.find("get_server_info")
    if body is None:
        raise EngineError("the engine has neither /server_info nor /get_server_info, so it is not SGLang")
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
        raise EngineError("/server_info has no page size: give --kv-cache-block-size")
    settings = Scrape(
        block_size=block_size,
        device_blocks=(info.max_total_num_tokens or 0) // block_size,
        has_prefix_caching=not info.disable_radix_cache,
    )
    endpoints = _endpoints(info, urlsplit(options.engine_url).hostname or "")
    return EngineFacts(
        models,
        info.version,
        scrape.or_else(settings),
        "sglang",
        ranks=max(info.dp_size, 1),
        endpoints=endpoints,
        max_batched_tokens=info.max_batched_tokens,
        max_sequences=info.max_running_requests or 0,
        tokenizer=info.tokenizer_path or info.model_path,
        lacks=tuple(_lacks(info, endpoints, options)),
    )


def _endpoints(info: ServerInfo, host: str) -> tuple[EventEndpoints, ...]:
    config = info.kv_events_config
    if not config:
        return ()
    text = config if isinstance(config, str) else msgspec.json.encode(config).decode()
    return read_config(text, host, max(info.dp_size, 1))


def _lacks(info: ServerInfo, endpoints: tuple[EventEndpoints, ...], options: AgentOptions) -> Iterator[str]:
    if info.disable_radix_cache:
        yield CACHING_OFF
    if not endpoints:
        yield EVENTS_OFF
    else:
        yield from endpoint_lacks(options, endpoints, max(info.dp_size, 1))
    if not info.enable_metrics:
        yield NO_METRICS
    if not info.enable_cache_report:
        yield CACHED_TOKENS_UNKNOWN


PAGE_OF_ONE = "page size 1 is not indexed: start SGLang with --page-size 16 (or 32, 64)"


class SglangAdapter(VllmAdapter):
    """Passes SGLang's events to a publisher, except those of its default page size of one token."""

    def _stored(self, event: BlockStored, sink: Sink) -> None:
        if event.block_size == 1:
            self.skipped.note(PAGE_OF_ONE)
        else:
            super()._stored(event, sink)
