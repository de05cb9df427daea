"""vLLM's KV events: decoding both of their shapes, and what they mean for a publisher.

    payload = [ts, [event, …], data_parallel_rank]
    event   = {"type": "BlockStored", "block_hashes": …}      vLLM after June 2026
            | ["BlockStored", block_hashes, …]                 until 0.23, and SGLang

Fields and meanings were observed on vLLM 0.32; later fields are ignored. A BlockStored that
cannot be read is skipped (blocks are missed, none is imagined); a removal that cannot be read
makes the batch malformed, because going on would leave blocks published that are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from kvrouter.core.blocks import multimodal_id
from kvrouter.core.events import UNREADABLE
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.engine_blocks import BlockIds, EngineHash

Token = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Size = Annotated[int, Meta(ge=1)]
ExtraKeys: TypeAlias = list[list[Any] | None] | None
"""One entry per block: nil, or untagged values: LoRA name, [item, offset], salt, digest bytes."""

TIER_OF_MEDIUM = {
    None: "device", "GPU": "device",
    "CPU": "host", "CPU_PINNED": "host",
    "STORAGE": "disk", "DISK": "disk",
}  # fmt: skip
_FULL_ATTENTION = {None, "full_attention", "mla_attention"}


class BlockStored(Struct, frozen=True, tag="BlockStored", tag_field="type"):
    """Physical blocks now hold these tokens; `token_ids` is empty for blocks named before."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[Token]
    block_size: Size
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Struct, frozen=True, tag="BlockRemoved", tag_field="type"):
    """Physical blocks no longer hold these hashes."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag="AllBlocksCleared", tag_field="type"):
    """The prefix cache is empty."""


class AllCacheCleared(Struct, frozen=True, tag="AllCacheCleared", tag_field="type"):
    """Every cache is empty."""


class _StoredArray(BlockStored, frozen=True, array_like=True):
    pass


class _RemovedArray(BlockRemoved, frozen=True, array_like=True):
    pass


class _BlocksClearedArray(AllBlocksCleared, frozen=True, array_like=True):
    pass


class _CacheClearedArray(AllCacheCleared, frozen=True, array_like=True):
    pass


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | AllCacheCleared
_ArrayEvent: TypeAlias = _StoredArray | _RemovedArray | _BlocksClearedArray | _CacheClearedArray


class _Maps(Struct, frozen=True, array_like=True):
    ts: float
    events: list[Event]
    rank: int | None = None


class _Arrays(Struct, frozen=True, array_like=True):
    ts: float
    events: list[_ArrayEvent]
    rank: int | None = None


class _Raws(Struct, frozen=True, array_like=True):
    ts: float
    events: list[Raw]
    rank: int | None = None


_decode_maps = msgspec.msgpack.Decoder(_Maps).decode
_decode_arrays = msgspec.msgpack.Decoder(_Arrays).decode
_decode_raws = msgspec.msgpack.Decoder(_Raws).decode
_decode_map: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_decode_array: msgspec.msgpack.Decoder[_ArrayEvent] = msgspec.msgpack.Decoder(_ArrayEvent)


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one scheduler step; `ts` in seconds since the epoch. `skipped` counts by type.

    `is_mapped`: the events have the shape of vLLM after June 2026.
    """

    ts: float
    rank: int | None
    events: Sequence[Event]
    skipped: Counter[str] = field(default_factory=Counter)
    is_mapped: bool = False


def decode_batch(payload: bytes) -> Batch:
    """Read a batch of either shape. Raises MalformedFrameError."""
    try:
        maps = _decode_maps(payload)
    except UNREADABLE:
        return _decode_array_batch(payload)
    return Batch(maps.ts, maps.rank, maps.events, is_mapped=True)


def _decode_array_batch(payload: bytes) -> Batch:
    try:
        arrays = _decode_arrays(payload)
    except UNREADABLE:
        return _decode_leniently(payload)
    return Batch(arrays.ts, arrays.rank, arrays.events)


def _decode_leniently(payload: bytes) -> Batch:
    """Event by event: for batches with types unknown here, or with something malformed."""
    try:
        raws = _decode_raws(payload)
    except UNREADABLE as error:
        raise MalformedFrameError(f"no vLLM event batch: {error}") from None
    batch = Batch(raws.ts, raws.rank, events := [])
    for raw in raws.events:
        event = _decode_event(raw)
        if isinstance(event, str):
            batch.skipped[event] += 1
        else:
            events.append(event)
    return batch


def _decode_event(raw: Raw) -> Event | str:
    """The event, or the type of one to be skipped."""
    for decoder in (_decode_map, _decode_array):
        try:
            return decoder.decode(raw)
        except UNREADABLE:
            continue
    name = _event_type(raw)
    if name in {"BlockRemoved", "AllBlocksCleared", "AllCacheCleared"}:
        raise MalformedFrameError(f"vLLM {name} that cannot be read")
    return name


def _event_type(raw: Raw) -> str:
    try:
        value = msgspec.msgpack.decode(raw)
        return str(value["type"] if isinstance(value, dict) else value[0])[:64]
    except (*UNREADABLE, LookupError, TypeError) as error:
        raise MalformedFrameError(f"vLLM event without a type: {error}") from None


class Sink(Protocol):
    """Where events go: a KvPublisher."""

    def stored(  # noqa: PLR0917  # KvPublisher's
        self,
        engine_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        parent: EngineHash | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
        tier: str = "device",
        *,
        ids: Sequence[BlockIds] = (),
        block_size: int | None = None,
    ) -> None:
        """Blocks were stored."""

    def removed(self, engine_hashes: Sequence[EngineHash], tier: str = "device") -> None:
        """Blocks were removed."""

    def cleared(self) -> None:
        """Everything was removed."""


class VllmAdapter:
    """Tells a publisher what vLLM's events mean. `skipped` counts what was not passed on, by reason.

    `group` is the KV group that is followed, None until events have shown it.
    """

    def __init__(self, sink: Sink) -> None:
        self.skipped: Counter[str] = Counter()
        self._sink = sink
        self.group: int | None = None

    def apply(self, batch: Batch) -> None:
        """Pass on a batch, in order."""
        self.skipped.update(batch.skipped)
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case _:
                    self._sink.cleared()

    def _stored(self, event: BlockStored) -> None:
        tier = TIER_OF_MEDIUM.get(event.medium)
        if tier is None:
            self.skipped[f"medium {event.medium}"] += 1
        elif not self._is_followed(event):
            self.skipped[f"group of {event.kv_cache_spec_kind}"] += 1
        elif not _is_whole(event):
            self.skipped["BlockStored"] += 1
        else:
            self._store(event, tier)

    def _store(self, event: BlockStored, tier: str) -> None:
        salt, ids = read_extra_keys(event)
        self._sink.stored(
            event.block_hashes,
            event.token_ids,
            event.parent_block_hash,
            event.lora_name,
            salt,
            tier,
            ids=ids,
            block_size=event.block_size,
        )

    def _removed(self, event: BlockRemoved) -> None:
        tier = TIER_OF_MEDIUM.get(event.medium)
        if tier is None:
            self.skipped[f"medium {event.medium}"] += 1
        elif event.group_idx in {None, self.group or 0}:
            self._sink.removed(event.block_hashes, tier)
        else:
            self.skipped["removal in another group"] += 1

    def _is_followed(self, event: BlockStored) -> bool:
        """Whether it is of the one KV group that counts: the first seen with full attention."""
        if event.group_idx is None:
            return event.kv_cache_spec_kind in _FULL_ATTENTION
        if self.group is None and event.kv_cache_spec_kind in _FULL_ATTENTION:
            self.group = event.group_idx
        return event.group_idx == self.group


def _is_whole(event: BlockStored) -> bool:
    """Whether tokens and extra keys fit the hashes; offload tiers name no tokens."""
    count = len(event.block_hashes)
    has_keys = event.extra_keys is None or len(event.extra_keys) == count
    return not event.token_ids or (has_keys and len(event.token_ids) == count * event.block_size)


def read_extra_keys(event: BlockStored) -> tuple[str | None, list[BlockIds]]:
    """The salt, shown on a root block only, and each block's multimodal ids (see `BlockIds`)."""
    if event.lora_id is not None and event.lora_name is None:
        return None, [None] * len(event.block_hashes)  # a LoRA whose name is not told
    if event.extra_keys is None:
        return None, []
    salt: str | None = None
    ids: list[BlockIds] = []
    for index, keys in enumerate(event.extra_keys):
        rest = list(keys or ())
        if event.lora_name is not None and event.lora_name in rest:
            rest.remove(event.lora_name)  # once: a salt may be the same word
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
