"""The bytes of vLLM's ZMQ event wire: three frames, topic, sequence number, msgpack batch.

vLLM 0.32 sends each event as a map with a "type" (`--event-shape map`); wheels up to 0.23 sent arrays, tag
first (`--event-shape array`). The batch around them is an array in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from kvrouter.mocker.events import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, KvEvent

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends a replay."""

EVENT_SHAPES = ("map", "array")


class _BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", gc=False):
    """`BlockStored` as vLLM 0.23 sent it: every field present."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None
    group_idx: int | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None


class _BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved", gc=False):
    """`BlockRemoved` as vLLM 0.23 sent it."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None


class _AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared", gc=False):
    """`AllBlocksCleared` as vLLM 0.23 sent it: the tag alone."""


_ArrayEvent: TypeAlias = _BlockStored | _BlockRemoved | _AllBlocksCleared


class BatchEncoder:
    """Encodes the events of one step."""

    def __init__(self, event_shape: str, rank: int) -> None:
        self._as_arrays = event_shape == "array"
        self._rank = rank
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, timestamp: float, events: Sequence[KvEvent]) -> bytes:
        """The payload frame: `[timestamp in s since the epoch, events, data-parallel rank]`."""
        shaped = [_as_array(event) for event in events] if self._as_arrays else events
        return self._encode((timestamp, shaped, self._rank))


def _as_array(event: KvEvent) -> _ArrayEvent:
    values = msgspec.structs.astuple(event)
    match event:
        case BlockStored():
            return _BlockStored(*values)
        case BlockRemoved():
            return _BlockRemoved(*values)
        case AllBlocksCleared():
            return _AllBlocksCleared()


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
