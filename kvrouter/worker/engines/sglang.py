"""SGLang: its KV events, and what the engine reports about itself.

    payload = [ts, [event, …], attn_dp_rank]
    event   = {"type": "BlockStored", "block_hashes": …}      SGLang 0.5.23
            | ["BlockStored", block_hashes, …]                 before

Read in SGLang's source (`disaggregation/kv_events.py`, `mem_cache/events.py`) and tested with payloads that
its own structs have encoded, not observed on an engine. One BlockStored names consecutive pages of its tree;
page hashes are signed 64-bit integers; a node's removals come parent first; a batch may lack its rank and a
replay its topic.

- `cache_salt` and `lora_name` are in each event of such pages; older versions have neither, so blocks that
  they separate by salt or adapter look alike. `session_id` names who caused an event, and does not matter.
- With EAGLE a page is made of pairs: each token with the one behind it. The first tokens of the pairs are the
  page's tokens. A prompt that differs in the very token behind a page has that page here, not in the engine.
- Medium EXTERNAL is a pool that other workers read as well, so it is not a reason to prefer one.

SGLang reports its settings at /server_info (older versions at /get_server_info), its API keys among them:
only the fields below are read. /metrics exists only with --enable-metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.wire.heartbeats import PREFILL
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import MOST_AMOUNT, Amount, BlockSize, Ranks, Text, TokenId
from kvrouter.worker.engines.adapter import Adapter, Batch
from kvrouter.worker.engines.endpoints import EVENTS_ARE_OFF, endpoint_lacks, read_config
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineError, EngineHttp, Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.engines.roles import settled_sglang
from kvrouter.worker.engines.vllm import (
    BLOCK_SIZE_ASSUMED,
    DEFAULT_BLOCK_SIZE,
    ENDPOINTS_UNKNOWN,
    TIER_OF_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlocksClearedArray,
    Hash,
    RemovedArray,
    Size,
    Wire,
    word,
)
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.publisher import Sink
from kvrouter.worker.zmq.sockets import EventEndpoints

EVENTS_OFF = (
    EVENTS_ARE_OFF + "start SGLang with --kv-events-config "
    '\'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\''
)
CACHING_OFF = "prefix caching is off: start SGLang without --disable-radix-cache"
NO_METRICS = "load unknown, only this router's own requests count: start SGLang with --enable-metrics"
CACHED_TOKENS_UNKNOWN = (
    "cached_tokens unknown, so predictions cannot be checked: start SGLang with --enable-cache-report"
)
SETTINGS_UNKNOWN = (
    "its settings are unknown: neither /server_info nor /get_server_info is below its URL; give the URL of "
    "SGLang itself, not that of a gateway that hides them"
)
PAGE_SIZE_1 = (
    "page size 1 makes every token a block, far too many to publish and compare: "
    "start SGLang with --page-size 16 (or 32, 64)"
)


class SglangInfo(Struct, frozen=True):
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
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: Annotated[int, Meta(ge=0, le=65535)] = 0

    @property
    def max_batched_tokens(self) -> int:
        """Prompt tokens in one step. A chunk size of -1 means that prompts are not chunked."""
        chunk = self.chunked_prefill_size or 0
        return chunk if 0 < chunk <= MOST_AMOUNT else self.max_prefill_tokens or 0


_decode_info = msgspec.json.Decoder(SglangInfo).decode


def read_server_info(body: bytes) -> SglangInfo:
    """Read /server_info. Raises EngineError."""
    try:
        return _decode_info(body)
    except UNREADABLE as error:
        raise EngineError(f"/server_info is not in SGLang's format: {error}") from None


async def learn_sglang(engine: EngineHttp, models: Models, options: AgentOptions) -> EngineFacts:
    """Ask /server_info and /metrics. Raises EngineError."""
    body = await engine.find_if_shown("server_info") or await engine.find_if_shown("get_server_info")
    info = read_server_info(body) if body is not None else None
    half = settled_sglang("" if info is None else info.disaggregation_mode or "null", options)
    scrape, _ = await engine.scrape_if_any()
    if info is None:
        facts = _facts_without_settings(models, scrape, options)
        return replace(facts, role=half.role, kv_connector=half.connector)
    port = info.disaggregation_bootstrap_port if half.role == PREFILL else 0
    facts = _facts(info, models, scrape, options)
    return replace(facts, role=half.role, kv_connector=half.connector, bootstrap_port=port)


def _facts_without_settings(models: Models, scrape: Scrape, options: AgentOptions) -> EngineFacts:
    """Of an engine behind a gateway that shows the paths of OpenAI's API only."""
    known = options.block_size or scrape.block_size
    lacks = (
        SETTINGS_UNKNOWN,
        "" if options.endpoints else ENDPOINTS_UNKNOWN,
        "" if scrape.loads else NO_METRICS,
        "" if known else BLOCK_SIZE_ASSUMED,
    )
    return EngineFacts(
        models,
        "",
        scrape,
        "sglang",
        ranks=max(len(scrape.loads), 1),
        tokenizer=models.root,
        lacks=tuple(filter(None, lacks)),
        assumed_block_size=DEFAULT_BLOCK_SIZE,
        has_metrics=bool(scrape.loads or scrape.block_size),
    )


def _facts(info: SglangInfo, models: Models, scrape: Scrape, options: AgentOptions) -> EngineFacts:
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


def _endpoints(info: SglangInfo, host: str) -> tuple[EventEndpoints, ...]:
    config = info.kv_events_config
    if not config:
        return ()
    text = config if isinstance(config, str) else msgspec.json.encode(config).decode()
    return read_config(text, host, max(info.dp_size, 1))


def _lacks(info: SglangInfo, endpoints: tuple[EventEndpoints, ...], options: AgentOptions) -> Iterator[str]:
    if info.disable_radix_cache and info.disaggregation_mode != "decode":  # which has none by default
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
EXTERNAL = "medium EXTERNAL: other workers read this pool, too, so hits there are not predicted"
# 0.5.23 names media as vLLM does; versions before it numbered the tiers of host and storage.
_TIERS = {**TIER_OF_MEDIUM, "CPU_TIER1": "host", "CPU_TIER2": "disk"}
PAIRS = (
    "pages are pairs of tokens (EAGLE): a prompt that differs in the first token after a cached page is "
    "predicted one page too high"
)
# Not a tuple: msgspec 0.22 crashes when a union of it with a number that has limits is collected.
_Pair = Annotated[list[TokenId], Meta(min_length=2, max_length=2)]


class PagesStored(Struct, frozen=True, tag="BlockStored", tag_field="type"):
    """Consecutive pages now hold these tokens, or pairs of tokens."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[TokenId | _Pair]
    block_size: Size
    lora_id: int | str | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class _PagesArray(PagesStored, frozen=True, array_like=True):
    pass


Event: TypeAlias = PagesStored | BlockRemoved | AllBlocksCleared
_WIRE: Wire[Event] = Wire(Event, _PagesArray | RemovedArray | BlocksClearedArray)


class SglangAdapter(Adapter[Event]):
    """Passes SGLang's events to a publisher, except those of its default page size of one token."""

    def __init__(self) -> None:
        super().__init__()
        self._has_pairs = False

    @property
    def notes(self) -> list[str]:
        return [PAIRS] if self._has_pairs else []

    def forget(self) -> None:
        self._has_pairs = False

    def decode(self, payload: bytes) -> Batch[Event]:
        return _WIRE.decode(payload)

    def publish(self, batch: Batch[Event], sink: Sink) -> None:
        for reason, times in batch.skipped.items():
            self.skipped.note(reason, times)
        for event in batch.events:
            match event:
                case PagesStored():
                    self._stored(event, sink)
                case BlockRemoved():
                    if (tier := self._tier(event.medium)) is not None:
                        sink.removed(event.block_hashes, tier)
                case _:
                    sink.cleared()

    def _stored(self, event: PagesStored, sink: Sink) -> None:
        tier = self._tier(event.medium)
        if tier is None:
            return
        if event.block_size == 1:
            self.skipped.note(PAGE_OF_ONE)
        elif not event.block_size or len(event.token_ids) != len(event.block_hashes) * event.block_size:
            self.skipped.note("BlockStored whose tokens do not fit its hashes")
        else:
            # the adapter's number alone does not name its blocks
            is_nameless = event.lora_id is not None and event.lora_name is None
            sink.stored(
                event.block_hashes,
                self._tokens(event),
                event.parent_block_hash,
                event.lora_name,
                event.cache_salt,
                tier,
                ids=[None] * len(event.block_hashes) if is_nameless else (),
                block_size=event.block_size,
            )

    def _tokens(self, event: PagesStored) -> list[int]:
        """The token ids; of a pair the first."""
        ids = [token if isinstance(token, int) else token[0] for token in event.token_ids]
        self._has_pairs |= bool(event.token_ids) and not isinstance(event.token_ids[0], int)
        return ids

    def _tier(self, medium: str | None) -> str | None:
        """The tier of a medium; None, and counted as skipped, if it is none of the worker's own."""
        name = medium and medium.upper()
        tier = _TIERS.get(name)
        if tier is None:
            self.skipped.note(EXTERNAL if name == "EXTERNAL" else f"medium {word(medium)}")
        return tier
