"""vLLM: its KV events in both of their shapes, and what the engine reports about itself.

    payload = [ts, [event, …], data_parallel_rank]
            | {"ts": …, "events": [event, …], "data_parallel_rank": …}      vLLM's main branch
    event   = {"type": "BlockStored", "block_hashes": …}      vLLM after June 2026
            | ["BlockStored", block_hashes, …]                 until 0.23, and SGLang

Fields and meanings were observed on vLLM 0.32 and 0.33; other fields are ignored. A BlockStored that cannot
be read is skipped: its blocks are missed, which is only an undercount. A removal that cannot be read makes
the batch malformed, because blocks that no longer exist would stay published.

With EAGLE or MTP vLLM 0.33 names a block by its own tokens and those behind it (`lookahead_token_ids`); so do
prompts then (core/wire/hashes.py). Earlier versions, and engines with a connector, drop a block instead.

A model with layers of several kinds has a KV group for each. The blocks of the first group with full
attention are published. Another group shows where the engine can resume a prompt (docs/concepts/design.md) if
its rule is known here and its blocks have the same size.

Three kinds of events are ignored, stores and removals alike, so that references stay in balance:

- media that are not a tier;
- KV groups without a rule, and every other group outside the device;
- `locality` REMOTE: other workers reach such a block as well, so it does not speak for this worker.

A mocker imitates vLLM, so this module serves it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Raw, Struct

from kvrouter.core.wire.hashes import lookahead_id, multimodal_id
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import MOST_BLOCK_SIZE, MOST_LOOKAHEAD, Text, TokenId
from kvrouter.engine_versions import reaches, since
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.blocks.engine_blocks import BlockIds
from kvrouter.worker.blocks.resume_points import ALL
from kvrouter.worker.engines.adapter import Adapter, Batch
from kvrouter.worker.engines.bootstrap import PORT, learn_engine_ids
from kvrouter.worker.engines.endpoints import EVENTS_ARE_OFF, endpoint_lacks, read_sources
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import (
    EngineError,
    EngineGoneError,
    EngineHttp,
    Models,
    reason_of,
)
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.engines.roles import settled
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.publisher import Sink
from kvrouter.worker.zmq.sockets import EventEndpoints

# An EngineHash; vLLM's are 8 or 32 bytes.
Hash: TypeAlias = int | Annotated[bytes, Meta(max_length=64)]
# 0 where an offload tier names blocks without their tokens.
Size = Annotated[int, Meta(ge=0, le=MOST_BLOCK_SIZE)]
# One entry per block: nil, or untagged values: LoRA name, [item, offset], salt, digest bytes.
ExtraKeys: TypeAlias = list[list[Any] | None] | None

TIER_OF_MEDIUM = {
    None: "device", "GPU": "device",
    "CPU": "host", "CPU_PINNED": "host",
    "STORAGE": "disk", "DISK": "disk",
}  # fmt: skip
_FULL_ATTENTION = {None, "full_attention", "mla_attention", "sink_full_attention"}
_SLIDING_WINDOW = {"sliding_window", "sliding_window_mla"}
_LOCAL = {None, "LOCAL", "local"}
# LMCache 0.5.6: its server (multiprocess) announces chunks as CPU and removes them; inside vLLM it announces
# them as cpu and never removes one.
NO_REMOVALS = (
    "medium cpu: LMCache inside vLLM announces no removals, so hits that only it has are not predicted; "
    "its server does (LMCacheMPConnector)"
)
# Notes and reasons travel on the worker's card, and quote texts of the engine: all three are limited.
_MAX_KINDS = 8
_MAX_WORD = 32
_MAX_REASON = 160


class BlockStored(Struct, frozen=True, tag="BlockStored", tag_field="type"):
    """Physical blocks now hold these tokens. Blocks that were announced before may come without tokens."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[TokenId]
    block_size: Size
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    # Of each block the tokens behind it that are part of its hash (EAGLE and MTP since 0.33).
    lookahead_token_ids: list[Annotated[list[TokenId], Meta(max_length=MOST_LOOKAHEAD)]] | None = None


class BlockRemoved(Struct, frozen=True, tag="BlockRemoved", tag_field="type"):
    """Physical blocks no longer hold these hashes."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(Struct, frozen=True, tag="AllBlocksCleared", tag_field="type"):
    """The prefix cache is empty."""


class AllCacheCleared(Struct, frozen=True, tag="AllCacheCleared", tag_field="type"):
    """Every cache is empty."""


class _StoredArray(BlockStored, frozen=True, array_like=True):
    pass


class RemovedArray(BlockRemoved, frozen=True, array_like=True):
    pass


class BlocksClearedArray(AllBlocksCleared, frozen=True, array_like=True):
    pass


class _CacheClearedArray(AllCacheCleared, frozen=True, array_like=True):
    pass


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | AllCacheCleared


_Event = TypeVar("_Event")


def _batch_of(events: Any, *, is_array: bool) -> Any:
    """A struct for a batch of such events. Not a generic one: msgspec 0.22 crashes when it is collected."""
    rank = msgspec.field(name=None if is_array else "data_parallel_rank", default=None)
    fields: list[Any] = [("ts", float), ("events", list[events]), ("rank", int | None, rank)]
    return msgspec.defstruct("Batch", fields, frozen=True, array_like=is_array)


class Wire(Generic[_Event]):
    """Decodes batches of one engine's events, in all shapes of batch and event."""

    def __init__(self, maps: Any, arrays: Any) -> None:
        """`maps` and `arrays`: the union of the events' types in each shape."""
        decoder = msgspec.msgpack.Decoder
        self._maps = decoder(_batch_of(maps, is_array=True)).decode
        self._arrays = decoder(_batch_of(arrays, is_array=True)).decode
        self._maps_in_map = decoder(_batch_of(maps, is_array=False)).decode
        self._map = decoder(maps).decode
        self._array = decoder(arrays).decode

    def decode(self, payload: bytes) -> Batch[_Event]:
        """Read a batch. Raises MalformedFrameError."""
        try:
            maps = self._maps_in_map(payload) if _is_map(payload) else self._maps(payload)
        except UNREADABLE:
            return self._decode_array_batch(payload)
        # maps came in vLLM before reports did, so an engine that sends maps may be able to report
        return _batch(maps.ts, maps.rank, maps.events, can_report=True)

    def _decode_array_batch(self, payload: bytes) -> Batch[_Event]:
        try:
            arrays = self._arrays(payload)
        except UNREADABLE:
            return self._decode_leniently(payload)
        return _batch(arrays.ts, arrays.rank, arrays.events)

    def _decode_leniently(self, payload: bytes) -> Batch[_Event]:
        """Decode event by event: for batches with unknown types or malformed events."""
        try:
            raws = _decode_raws_in_map(payload) if _is_map(payload) else _decode_raws(payload)
        except UNREADABLE as error:
            raise MalformedFrameError(f"not a vLLM event batch: {error}") from None
        events: list[_Event] = []
        skipped: Counter[str] = Counter()
        for raw in raws.events:
            event = self._decode_event(raw)
            if isinstance(event, str):
                skipped[event] += 1
            else:
                events.append(event)
        return _batch(raws.ts, raws.rank, events, skipped)

    def _decode_event(self, raw: Raw) -> _Event | str:
        """The event, or the reason why it is skipped."""
        try:
            event: _Event = (self._map if _is_map(memoryview(raw)) else self._array)(raw)
        except UNREADABLE as error:
            return _skip_reason(_event_type(raw), error)
        return event


_decode_raws = msgspec.msgpack.Decoder(_batch_of(Raw, is_array=True)).decode
_decode_raws_in_map = msgspec.msgpack.Decoder(_batch_of(Raw, is_array=False)).decode
_WIRE: Wire[Event] = Wire(Event, _StoredArray | RemovedArray | BlocksClearedArray | _CacheClearedArray)


def decode_batch(payload: bytes) -> Batch[Event]:
    """Read a batch of any shape. Raises MalformedFrameError."""
    return _WIRE.decode(payload)


def _is_map(content: bytes | memoryview) -> bool:
    """Whether MessagePack begins with a map: fixmap, map 16, map 32."""
    return len(content) > 0 and (content[0] & 0xF0 == 0x80 or content[0] in {0xDE, 0xDF})


def _batch(
    ts: float,
    rank: int | None,
    events: Sequence[_Event],
    skipped: Counter[str] | None = None,
    *,
    can_report: bool = False,
) -> Batch[_Event]:
    clears = any(isinstance(event, AllBlocksCleared | AllCacheCleared) for event in events)
    return Batch(ts, rank, events, skipped or Counter(), clears, can_report)


def _skip_reason(name: str, error: Exception) -> str:
    """Raises MalformedFrameError if an event of this type must not be missed."""
    if name in {"BlockRemoved", "AllBlocksCleared", "AllCacheCleared"}:
        raise MalformedFrameError(f"vLLM {name} that cannot be read: {error}")
    if name == "BlockStored":
        return f"BlockStored that cannot be read: {error}"[:_MAX_REASON]
    return f"event {name}"


def _event_type(raw: Raw) -> str:
    try:
        value = msgspec.msgpack.decode(raw)
        return word(value["type"] if isinstance(value, dict) else value[0])
    except (*UNREADABLE, LookupError, TypeError) as error:
        raise MalformedFrameError(f"vLLM event without a type: {error}") from None


class VllmAdapter(Adapter[Event]):
    """Passes vLLM's events to a publisher. See `Adapter`.

    Where the engine speculates, windows need one block more; with a lookahead no block is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        # The size of the blocks of that group, the largest so far; 0 before its first store.
        self._block_size = 0
        # By KV group: the largest block on the device in this life of the engine.
        self._sizes: dict[int | None, int] = {}
        # Other groups, with the reason why one is not followed whatever its size; empty if it may be.
        self._others: dict[int, str] = {}
        self._other_kinds: dict[int, str] = {}
        self._other_sizes: dict[int, int] = {}

    @property
    def notes(self) -> list[str]:
        """Which KV groups are followed, if there are several."""
        if not self._others:
            return []
        if self.group is None:
            others = ", ".join(self._other_kinds[number] for number in sorted(self._others))
            return [f"no overlap is known: no KV group with full attention so far, only {others}"]
        followed = [f"group {self.group}"]
        reasons = {one: self._why_ignored(one) for one in sorted(self._others)}
        followed += [self._other_kinds[one] for one, why in reasons.items() if not why]
        ignored = [f"{self._other_kinds[one]}: {why}" for one, why in reasons.items() if why]
        notes = [f"overlap follows several KV groups: {', '.join(followed)}"] if len(followed) > 1 else []
        if ignored:
            notes.append(f"predictions may be too high: overlap does not follow {', '.join(ignored)}")
        return notes

    def restore(self, group: int | None, block_size: int, lookahead: int) -> None:
        super().restore(group, block_size, lookahead)
        self._block_size = block_size

    def forget(self) -> None:
        # another life of the engine may have other KV groups
        self.group, self._block_size = None, 0
        self._others.clear()
        self._other_kinds.clear()
        self._other_sizes.clear()
        self._sizes.clear()

    def decode(self, payload: bytes) -> Batch[Event]:
        return decode_batch(payload)

    def publish(self, batch: Batch[Event], sink: Sink) -> None:
        for reason, times in batch.skipped.items():
            self.skipped.note(reason, times)
        if not self._block_size or self._others:
            self._find_group(batch.events)
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event, sink)
                case BlockRemoved():
                    self._removed(event, sink)
                case _:
                    sink.cleared()

    def _stored(self, event: BlockStored, sink: Sink) -> None:
        tier = self._tier(event)
        if tier is None:
            return
        if event.group_idx is not None and event.group_idx != (self.group or 0):
            self._store_other(event, event.group_idx, tier, sink)
        elif self.group is None and event.kv_cache_spec_kind not in _FULL_ATTENTION:
            self._store_other(event, event.group_idx or 0, tier, sink)
        elif not _is_whole(event):
            self.skipped.note("BlockStored whose tokens or extra keys do not fit its hashes")
        elif event.token_ids and tier != "device" and event.extra_keys is None:
            self._store_chunks(event, tier, sink)
        else:
            if tier == "device" and event.token_ids:
                self.lookahead = len(next(iter(event.lookahead_token_ids or ()), ()))
            _store(event, tier, sink, is_part=tier == "device" and self._is_part(event))

    def _is_part(self, event: BlockStored) -> bool:
        """Whether the blocks are smaller than others of their group: the filled part of a last block.

        Hybrid engines with Mamba layers announce these. No prompt is hashed in their size.
        """
        known = self._sizes.get(event.group_idx, 0)
        self._sizes[event.group_idx] = max(known, event.block_size)
        self._block_size = max(self._block_size, event.block_size)
        return event.block_size < known

    def _store_chunks(self, event: BlockStored, tier: str, sink: Sink) -> None:
        """Blocks of an offload tier whose event may lack their salt, so that its tokens do not name them."""
        if event.medium == "cpu":
            self.skipped.note(NO_REMOVALS)
            return
        sink.stored_chunks(event.block_hashes, event.token_ids, event.parent_block_hash, tier)

    def _removed(self, event: BlockRemoved, sink: Sink) -> None:
        tier = self._tier(event)
        if tier is None:
            return
        # group 0 until a group is known, as for stores
        if event.group_idx is None or event.group_idx == (self.group or 0):
            sink.removed(event.block_hashes, tier)
        elif tier == "device" and not self._why_ignored(event.group_idx):
            sink.group_removed(event.group_idx, event.block_hashes)
        else:
            self.skipped.note("removal in another group")

    def _tier(self, event: BlockStored | BlockRemoved) -> str | None:
        """The tier of the event's blocks; None, and counted as skipped, if they are not followed."""
        tier = _tier_of(event)
        if tier is None:
            self.skipped.note(f"medium {word(event.medium)}")
        elif event.locality not in _LOCAL:
            self.skipped.note(f"locality {word(event.locality)}: other workers reach these blocks, too")
            return None
        return tier

    def _find_group(self, events: Sequence[Event]) -> None:
        """Find the group whose blocks are published, the first one with full attention, and their size.

        Before the events are applied: those of another group may come first.
        """
        for event in events:
            # only the device decides: events of offload tiers may lack the kind of their group
            if not isinstance(event, BlockStored) or _tier_of(event) != "device":
                continue
            if event.kv_cache_spec_kind in _FULL_ATTENTION and self.group in {None, event.group_idx}:
                self.group, self._block_size = event.group_idx, max(self._block_size, event.block_size)

    def _store_other(self, event: BlockStored, number: int, tier: str, sink: Sink) -> None:
        """A store in another group than the published one."""
        if tier != "device":
            self.skipped.note(f"group of {word(event.kv_cache_spec_kind)}")
            return
        if number not in self._others and len(self._others) < _MAX_KINDS:
            self._others[number] = "its rule is not known" if needed_blocks(event) is None else ""
            self._other_kinds[number] = f"group {number} ({_named(event)})"
        if number in self._others:
            self._other_sizes[number] = max(self._other_sizes.get(number, 0), event.block_size)
        needed = needed_blocks(event, speculates=self.speculates and not self.lookahead)
        if not self._block_size:
            return  # no block has a name so far, and one of another size never gets one
        # a smaller block than the published ones is the filled part of a last block, which has no name there
        is_whole = event.block_size == self._block_size
        if needed is not None and is_whole and number in self._others and not self._why_ignored(number):
            is_root = event.parent_block_hash is None
            sink.group_stored(number, needed, event.block_hashes, is_root=is_root)
        else:
            self.skipped.note(f"group of {word(event.kv_cache_spec_kind)}")

    def _why_ignored(self, number: int) -> str:
        """Why a group is not followed; empty if it is, or has not stored so far."""
        size = self._other_sizes.get(number, 0)
        if size in {0, self._block_size} or not self._block_size or self._others.get(number):
            return self._others.get(number, "")
        return f"its blocks have {size} tokens, not {self._block_size}"


def _tier_of(event: BlockStored | BlockRemoved) -> str | None:
    return TIER_OF_MEDIUM.get(event.medium and event.medium.upper())


def needed_blocks(event: BlockStored, *, speculates: bool = False) -> int | None:
    """How many blocks the event's group must hold before a place, so that the engine can resume there.

    ALL: every block from the root on. None: the rule of this kind of group is not known here. The rules are
    those of vLLM 0.32 (`find_longest_cache_hit` of each class in single_type_kv_cache_manager.py).
    """
    window, size = event.kv_cache_spec_sliding_window, event.block_size
    if event.kv_cache_spec_kind == "mamba":
        return 1  # a state after the last token before the place
    if event.kv_cache_spec_kind in _SLIDING_WINDOW and window and size:
        # with EAGLE a window is checked behind the block that is dropped, too
        return max(1, -(-(window - 1) // size)) + speculates
    return ALL if event.kv_cache_spec_kind in _FULL_ATTENTION - {None} else None


def _named(event: BlockStored) -> str:
    window = event.kv_cache_spec_sliding_window
    return word(event.kv_cache_spec_kind) + (f" of {window} tokens" if window else "")


def _store(event: BlockStored, tier: str, sink: Sink, *, is_part: bool) -> None:
    salt, ids = read_extra_keys(event)
    if event.lookahead_token_ids and event.token_ids:
        ids = _with_lookahead(ids or [()] * len(event.block_hashes), event.lookahead_token_ids)
    sink.stored(
        event.block_hashes,
        event.token_ids,
        event.parent_block_hash,
        event.lora_name,
        salt,
        tier,
        ids=[None] * len(event.block_hashes) if is_part else ids,
        block_size=event.block_size if event.token_ids else None,
    )


def _with_lookahead(ids: Sequence[BlockIds], lookahead: Sequence[Sequence[int]]) -> list[BlockIds]:
    return [
        None if known is None else [*known, lookahead_id(behind)]
        for known, behind in zip(ids, lookahead, strict=True)
    ]


def word(text: object) -> str:
    """A name given by an engine, short enough for a reason."""
    return str(text)[:_MAX_WORD]


def _is_whole(event: BlockStored) -> bool:
    """Whether tokens and extra keys fit the hashes. Events of offload tiers have no tokens."""
    count = len(event.block_hashes)
    has_keys = event.extra_keys is None or len(event.extra_keys) == count
    has_tokens = event.block_size > 0 and len(event.token_ids) == count * event.block_size
    has_lookahead = event.lookahead_token_ids is None or len(event.lookahead_token_ids) == count
    return not event.token_ids or (has_keys and has_tokens and has_lookahead)


def read_extra_keys(event: BlockStored) -> tuple[str | None, list[BlockIds]]:
    """The salt (only a root block has it), and each block's multimodal ids (see `BlockIds`)."""
    if event.lora_id is not None and event.lora_name is None:
        return None, [None] * len(event.block_hashes)  # without the LoRA's name the blocks cannot be named
    if event.extra_keys is None:
        return None, []
    salt: str | None = None
    ids: list[BlockIds] = []
    for index, keys in enumerate(event.extra_keys):
        rest = list(keys or ())
        if event.lora_name is not None and event.lora_name in rest:
            rest.remove(event.lora_name)  # only the first: a salt may be the same text
        if index == 0 and event.parent_block_hash is None and rest and isinstance(rest[-1], str):
            salt = rest.pop()
        ids.append(_multimodal_ids(rest))
    return salt, ids


def _multimodal_ids(keys: list[Any]) -> BlockIds:
    """The ids of `[item, offset]` keys; None if there is any other key."""
    ids: list[int] = []
    for key in keys:
        match key:
            case [str(item), int()]:
                ids.append(multimodal_id(item))
            case _:
                return None
    return ids


EVENTS_OFF = (
    EVENTS_ARE_OFF + "start vLLM with --enable-prefix-caching --kv-events-config "
    '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)
ENDPOINTS_UNKNOWN = (
    "event endpoints unknown, the engine does not report them: give --kv-events and --kv-replay "
    "(kvrouter serve: kv=tcp://HOST:PORT,replay=tcp://HOST:PORT) if its events are on"
)
ENDPOINTS_UNREADABLE = "event endpoints unknown, {why}: give --kv-events and --kv-replay if its events are on"
# vLLM's own on most GPUs.
DEFAULT_BLOCK_SIZE = 16
BLOCK_SIZE_ASSUMED = (
    f"block size unknown, {DEFAULT_BLOCK_SIZE} is assumed: give --kv-cache-block-size "
    "(kvrouter serve: block-size=N) if it is another"
)
NO_LOAD = (
    "load unknown, only this router's own requests count ({why}): let the engine serve /metrics below its "
    "URL{key} (llama.cpp: start it with --metrics)"
)
NO_SERIES = "/metrics has no vllm:num_requests_running"
_KEY = ", or give --engine-api-key-file"
CACHING_OFF = "prefix caching is off: start vLLM with --enable-prefix-caching"
CACHED_TOKENS_UNKNOWN = (
    "cached_tokens unknown, so predictions cannot be checked: start vLLM with --enable-prompt-tokens-details"
)


class _KvTransfer(Struct, frozen=True):
    kv_role: Text = ""
    kv_connector: Text | None = None


class _VllmConfig(Struct, frozen=True):
    kv_transfer_config: _KvTransfer | None = None


class _ServerInfo(Struct, frozen=True):
    vllm_config: _VllmConfig


_decode_server_info = msgspec.json.Decoder(_ServerInfo).decode


async def learn_vllm(engine: EngineHttp, models: Models, options: AgentOptions) -> EngineFacts:
    """Ask /metrics, /version, /server_info and /kv_event_sources. Raises EngineError."""
    scrape, why = await engine.scrape_if_any()
    config = await _kv_transfer(engine)
    half = settled(config.kv_role, word(config.kv_connector or scrape.kv_connector), options)
    kind = "mocker" if models.owner == "mocker" else "vllm"
    host = urlsplit(options.engine_url).hostname or ""
    endpoints, unread = await _endpoints(engine, host, binds=kind == "mocker")
    ranks = max(len(endpoints or ()), len(scrape.loads), 1)
    lacks = [*_event_lacks(scrape, endpoints, ranks, options, unread), *_metric_lacks(scrape, why, options)]
    version = await engine.version()
    return EngineFacts(
        models,
        version,
        scrape,
        kind,
        ranks=ranks,
        endpoints=endpoints or (),
        tokenizer=models.root,
        lacks=tuple(filter(None, (*lacks, half.lack))),
        assumed_block_size=DEFAULT_BLOCK_SIZE,
        has_metrics=bool(scrape.loads or scrape.block_size),
        takes_token_ids=reaches(version, since(kind).token_ids_of_chats) is True,
        # a mocker without a model directory reports its model's name as the root
        takes_text=kind != "mocker" or models.root not in models.served_names,
        role=half.role,
        kv_connector=half.connector,
        kv_engine_ids=await learn_engine_ids(options) if half.needs_bootstrap else (),
        bootstrap_port=PORT if half.needs_bootstrap else 0,
    )


async def _kv_transfer(engine: EngineHttp) -> _KvTransfer:
    """The engine's KV connector and its role; empty if it does not tell: only with VLLM_SERVER_DEV_MODE=1."""
    try:
        info = await engine.find("server_info?config_format=json")
        config = _decode_server_info(info).vllm_config.kv_transfer_config if info else None
    except (EngineError, *UNREADABLE):
        return _KvTransfer()
    return config or _KvTransfer()


async def _endpoints(
    engine: EngineHttp, host: str, *, binds: bool
) -> tuple[tuple[EventEndpoints, ...] | None, str]:
    """The endpoints of each rank; or None, and why the answer cannot be read. Raises EngineError."""
    try:
        sources = await engine.find_if_shown("kv_event_sources")
    except EngineGoneError:
        raise
    except EngineError as error:
        if await engine.version():
            raise  # a vLLM has this path: when it answers, its events are known
        return None, reason_of(error)  # a gateway that answers 502 to every path that it does not pass on
    try:
        return (read_sources(sources, host, binds=binds) if sources is not None else None), ""
    except EngineError as error:  # a gateway's page, for example
        return None, reason_of(error)


def _event_lacks(
    scrape: Scrape,
    endpoints: tuple[EventEndpoints, ...] | None,
    ranks: int,
    options: AgentOptions,
    unread: str,
) -> Iterator[str]:
    if scrape.has_prefix_caching is False:
        yield CACHING_OFF
    if endpoints is None and not options.endpoints:
        yield ENDPOINTS_UNREADABLE.format(why=unread) if unread else ENDPOINTS_UNKNOWN
    elif endpoints == ():
        yield EVENTS_OFF
    else:
        yield from endpoint_lacks(options, endpoints or (), ranks)


def _metric_lacks(scrape: Scrape, why: str, options: AgentOptions) -> Iterator[str]:
    if not scrape.loads:
        needs_key = why.endswith((" 401", " 403")) and options.api_key is None
        yield NO_LOAD.format(why=why or NO_SERIES, key=_KEY if needs_key else "")
    if not (options.block_size or scrape.block_size):
        yield BLOCK_SIZE_ASSUMED
