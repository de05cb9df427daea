"""vLLM's KV events and their bytes on the ZMQ wire.

The structs follow `vllm/distributed/kv_events.py` of 0.32, field by field and in its order. A message has
three frames: topic, sequence number, msgpack batch. vLLM 0.32 sends each event as a map with a "type"
(`--event-shape map`); versions up to 0.23 sent arrays, tag first (`--event-shape array`). With EAGLE vLLM
0.33 adds the token behind each block, which is part of the block's hash (`--event-shape map-0.33`). The batch
is an array in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

GPU = "GPU"
CPU = "CPU"
# `kv_cache_spec_kind` of an ordinary transformer.
SPEC_KIND = "full_attention"

# Per block: nil, or the LoRA name and (block 0) the cache salt, untagged.
# Per block: the LoRA name, `[identifier, offset in the block]` of each image, the salt.
ExtraKeys: TypeAlias = list[list[str | list[str | int]] | None]


class StoredBlocks(msgspec.Struct, frozen=True, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks became reusable. `token_ids` has the tokens of all of them, parent first."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    lookahead_token_ids: list[list[int]] | None = None


class RemovedBlocks(msgspec.Struct, frozen=True, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Physical blocks lost their contents; other copies of the same hash may remain."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class ClearedBlocks(msgspec.Struct, frozen=True, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """The prefix cache was reset."""


KvEvent: TypeAlias = StoredBlocks | RemovedBlocks | ClearedBlocks


def removed(engine_hash: int, medium: str) -> RemovedBlocks:
    """The removal of one block: vLLM sends an event for each."""
    return RemovedBlocks([engine_hash], medium, group_idx=0)


# Sequence number of the message that ends a replay.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

EVENT_SHAPES = ("map", "array", "map-0.33")
LOOKAHEAD = {"map-0.33": 1}
"""By shape, the tokens behind a block that its hash covers."""


class BatchEncoder:
    """Encodes the events of one step as one batch."""

    def __init__(self, event_shape: str, rank: int) -> None:
        self._as_arrays = event_shape == "array"
        self._rank = rank
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, timestamp: float, events: Sequence[KvEvent]) -> bytes:
        """The payload frame: `[timestamp in s since the epoch, events, data-parallel rank]`."""
        shaped = [_as_array(event) for event in events] if self._as_arrays else events
        return self._encode((timestamp, shaped, self._rank))


def _as_array(event: KvEvent) -> tuple[object, ...]:
    """As vLLM 0.23 sent it: the tag, then all fields of that version."""
    values = msgspec.structs.astuple(event)
    return event.__struct_config__.tag, *(values[:-1] if isinstance(event, StoredBlocks) else values)


def sequence_frame(seq: int) -> bytes:
    """The second frame: 8 bytes, big-endian, counted from 0."""
    return seq.to_bytes(8, "big")


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[KvEvent]
    data_parallel_rank: int


def decode(payload: bytes) -> list[KvEvent]:
    """The events of a payload frame of map shape."""
    return msgspec.msgpack.decode(payload, type=_Batch).events
