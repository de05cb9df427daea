"""KV events as vLLM defines them (`vllm/distributed/kv_events.py`, 0.32): field for field, in its order.

Encoding these structs gives the map shape of 0.32; `wire` re-shapes them for older consumers.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

GPU = "GPU"
CPU = "CPU"
SPEC_KIND = "full_attention"
"""`kv_cache_spec_kind` of an ordinary transformer."""

ExtraKeys: TypeAlias = list[list[str] | None]
"""Per block: nil, or the LoRA name and (block 0) the cache salt, untagged."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Blocks became reusable: `token_ids` holds the tokens of all of them, parent first."""

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


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Physical blocks lost their contents; other copies of the same hash may remain."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The prefix cache was reset."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def removed(engine_hash: int, medium: str) -> BlockRemoved:
    """One removal: vLLM sends an event for each block."""
    return BlockRemoved([engine_hash], medium, group_idx=0)
