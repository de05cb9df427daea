"""Which worker holds how much of a prompt: kvrouter's indexers and `BlockIndex` under Dynamo's names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

import kvrouter
from kvrouter import BlockIndex, Target, WorkerId
from kvrouter.client.membership import by_worker, deepest_first
from kvrouter.compat.dynamo.runtime import Component, names_of
from kvrouter.core.tables.approx import DEFAULT_TTL_S
from kvrouter.core.wire.hashes import (
    block_hashes,
    block_seed,
    hashes_of,
    seeded_block_hashes,
    sequence_hashes,
)
from kvrouter.core.wire.ids import BlockHash, SequenceHash
from kvrouter.core.wire.ops import DEVICE, Removed, Stored
from kvrouter.errors import ConfigError
from kvrouter.worker.blocks.published import PublishedBlocks


class OverlapScores(dict[str, int]):
    """Leading blocks of a prompt that each worker holds, by worker id; the deepest first.

    Workers that hold none are left out. A worker's id is text here, as in kvrouter's own names.
    """

    @property
    def scores(self) -> dict[str, int]:
        """The same as a plain dictionary."""
        return dict(self)

    @property
    def frequencies(self) -> list[int]:
        """How often blocks were used. Empty, as in Dynamo without an expiration: uses are not counted."""
        return []


def compute_block_hash_for_seq(
    tokens: Sequence[int],
    kv_block_size: int,
    block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    lora_name: str | None = None,
) -> list[BlockHash]:
    """The hash of each full block: Dynamo's values."""
    if not block_mm_infos:
        return block_hashes(tokens, kv_block_size, lora_name=lora_name)
    ids = [[item["mm_hash"] for item in (info or {}).get("mm_objects", ())] for info in block_mm_infos]
    ids += [[]] * (len(tokens) // kv_block_size - len(ids))
    return seeded_block_hashes(tokens, kv_block_size, block_seed(lora_name), ids)


class KvIndexer:
    """`kvrouter.KvIndexer` of a component's namespace, which serves one model. Opened when first asked."""

    def __init__(self, component: Component, block_size: int) -> None:
        runtime, name = component.runtime, component.namespace.name

        @contextlib.asynccontextmanager
        async def subscribed() -> AsyncIterator[kvrouter.KvIndexer]:
            async with kvrouter.KvIndexer(block_size).subscribe(runtime.nats, name) as indexer:
                yield indexer

        self._block_size = block_size
        self._held = runtime.holds(subscribed)

    def block_size(self) -> int:
        """Tokens of one block."""
        return self._block_size

    async def find_matches(self, sequence: Sequence[int]) -> OverlapScores:
        """Of a prompt's block hashes (`compute_block_hash_for_seq`)."""
        indexer = await self._held.get()
        return OverlapScores(by_worker(indexer.find_matches_by_hashes([*map(BlockHash, sequence)])))

    async def find_matches_for_request(
        self, token_ids: Sequence[int], lora_id: int = 0, *, lora_name: str | None = None
    ) -> OverlapScores:
        """Of a prompt's tokens. Raises ConfigError for a `lora_id`: adapters have names here."""
        if lora_id and not lora_name:
            raise ConfigError(f"lora_id {lora_id}: give lora_name")
        indexer = await self._held.get()
        return OverlapScores(indexer.find_matches_for_request(token_ids, lora_name))


class ApproxKvIndexer:
    """`kvrouter.ApproxKvIndexer`: blocks are assumed to stay where they were sent for `router_ttl_secs`."""

    def __init__(
        self,
        component: Component | None,
        kv_block_size: int,
        router_ttl_secs: float = DEFAULT_TTL_S,
        router_max_tree_size: int = 1 << 20,  # a worker is assumed to hold a million blocks at most
        router_prune_target_ratio: float = 0.8,  # the least recently used blocks go one by one
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._indexer = kvrouter.ApproxKvIndexer(kv_block_size, router_ttl_secs, clock=clock)

    def block_size(self) -> int:
        """Tokens of one block."""
        return self._indexer.block_size

    async def find_matches_for_request(
        self, token_ids: Sequence[int], *, lora_name: str | None = None
    ) -> OverlapScores:
        """Of a prompt's tokens."""
        return OverlapScores(self._indexer.find_matches_for_request(token_ids, lora_name))

    async def process_routing_decision_for_request(
        self,
        tokens: Sequence[int],
        worker_id: int | str,
        dp_rank: int = 0,
        *,
        lora_name: str | None = None,
    ) -> None:
        """The worker is assumed to hold the blocks of a prompt that was sent to it."""
        self._indexer.process_routing_decision_for_request(tokens, str(worker_id), dp_rank, lora_name)


class _EventBlock(msgspec.Struct):
    block_hash: int
    tokens_hash: int


class _StoredEvent(msgspec.Struct):
    blocks: list[_EventBlock]
    parent_hash: int | None = None


class _RemovedEvent(msgspec.Struct):
    block_hashes: list[int]


class _Data(msgspec.Struct, omit_defaults=True):
    stored: _StoredEvent | None = None
    removed: _RemovedEvent | None = None


class _Event(msgspec.Struct):
    """A KV cache event as JSON; `data` is an object with `stored` or `removed`, or the text `cleared`."""

    event_id: int
    data: _Data | str
    dp_rank: int = 0


_decode_event = msgspec.json.Decoder(_Event).decode


class _RankBlocks:
    """The blocks of one rank: the engine's names, and what is published of them, prefix-closed."""

    def __init__(self) -> None:
        self.sequences: dict[int, int] = {}  # by the engine's name
        self.tokens: dict[int, tuple[int, int]] = {}  # by sequence hash: the engine's name, the block's hash
        self.published = PublishedBlocks()

    def store(self, event: _StoredEvent) -> None:
        parent: int | None = None
        if event.parent_hash is not None:
            parent = self.sequences.get(*names_of([event.parent_hash]))
            if parent is None:
                raise ValueError(f"parent_hash {event.parent_hash}: no such block is stored")
        hashes = [BlockHash(*names_of([block.tokens_hash])) for block in event.blocks]
        chain = sequence_hashes(hashes, None if parent is None else SequenceHash(parent))
        names = names_of([block.block_hash for block in event.blocks])
        for name, block_hash, sequence in zip(names, hashes, chain, strict=True):
            if name not in self.sequences:
                self.sequences[name] = sequence
                self.tokens[sequence] = (name, block_hash)
                self.published.add(sequence, parent, DEVICE)
            parent = sequence

    def remove(self, event: _RemovedEvent) -> None:
        for name in names_of(event.block_hashes):
            if (sequence := self.sequences.pop(name, None)) is not None:
                self.published.drop(sequence, DEVICE)


class RadixTree:
    """`kvrouter.BlockIndex`, fed with Dynamo's KV cache events (JSON)."""

    def __init__(self, expiration_duration_secs: float | None = None) -> None:
        if expiration_duration_secs is not None:
            raise ConfigError(
                "expiration_duration_secs: blocks here stay until they are removed; ApproxKvIndexer has a ttl"
            )
        self._index = BlockIndex()
        self._ranks: dict[Target, _RankBlocks] = {}

    def find_matches(self, sequence: Sequence[int], early_exit: bool = False) -> OverlapScores:
        """Of a prompt's block hashes. `early_exit`: only the first block is looked for."""
        hashes = [BlockHash(block) for block in (sequence[:1] if early_exit else sequence)]
        return OverlapScores(by_worker(deepest_first(self._index.overlap(sequence_hashes(hashes)))))

    def apply_event(self, worker_id: int | str, kv_cache_event_bytes: bytes) -> None:
        """Apply one event. Raises ValueError if it cannot be read, or its parent is not stored."""
        try:
            event = _decode_event(kv_cache_event_bytes)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a KV cache event: {error}") from None
        target = Target(WorkerId(str(worker_id)), event.dp_rank)
        if isinstance(event.data, str):
            self._clear(target)
            return
        rank = self._ranks.setdefault(target, _RankBlocks())
        if event.data.stored is not None:
            rank.store(event.data.stored)
        if event.data.removed is not None:
            rank.remove(event.data.removed)
        for op in rank.published.take_ops():
            if isinstance(op, Stored):
                self._index.store(target, op.hashes)
            elif isinstance(op, Removed):
                self._index.remove(target, op.hashes)

    def remove_worker(self, worker_id: int | str) -> None:
        """Forget the worker."""
        for target in [target for target in self._ranks if target.worker_id == str(worker_id)]:
            self._clear(target)
            self._index.drop(target)

    def clear_all_blocks(self, worker_id: int | str) -> None:
        """The worker has emptied its cache."""
        for target in [target for target in self._ranks if target.worker_id == str(worker_id)]:
            self._clear(target)

    def dump_tree_as_events(self) -> list[str]:
        """Events that build the tree again: `{"worker_id", "event"}`, parents first."""
        return [
            msgspec.json.encode({"worker_id": target.worker_id, "event": event}).decode()
            for target, rank in self._ranks.items()
            for event in _events_of(target, rank)
        ]

    def _clear(self, target: Target) -> None:
        self._ranks.pop(target, None)
        self._index.clear(target)
        while self._index.sweep():
            pass


def _events_of(target: Target, rank: _RankBlocks) -> list[_Event]:
    events: list[_Event] = []
    for op in rank.published.state_ops():
        if isinstance(op, Stored):
            blocks = [_EventBlock(*rank.tokens[sequence]) for sequence in hashes_of(op.hashes)]
            parent = None if op.parent is None else rank.tokens[op.parent][0]
            events.append(_Event(len(events), _Data(stored=_StoredEvent(blocks, parent)), target.rank))
    return events
