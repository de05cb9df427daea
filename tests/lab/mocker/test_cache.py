"""The paged cache behaves as vLLM's block pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvrouter.lab.mocker.cache import BlockCache, Chain, Hit
from kvrouter.lab.mocker.events import CPU, GPU, ClearedBlocks, KvEvent, RemovedBlocks, StoredBlocks
from kvrouter.lab.mocker.hashing import token_ids

BLOCK_SIZE = 4
DATA = Path(__file__).parents[2] / "data"


def serve(cache: BlockCache, tokens: list[int], *, output: int = 0, **keys: Any) -> Hit:
    """Run one request through the cache alone: its prompt, then `output` tokens; returns its hit."""
    size = cache.block_size
    chain = Chain(token_ids(tokens), size, **keys)
    hit = cache.lookup(chain, (len(tokens) - 1) // size)
    blocks = -(-len(tokens) // size)
    assert cache.open(chain, hit, blocks, must_fit_blocks=blocks)
    cache.store(chain, len(tokens) // size)
    for token in range(output - 1):  # the last token's keys and values are never computed
        extend(cache, chain, token)
    cache.release(chain)
    cache.check()
    return hit


def extend(cache: BlockCache, chain: Chain, token: int) -> None:
    """One decode step."""
    chain.tokens.append(token)
    assert cache.grow(chain, -(-len(chain.tokens) // cache.block_size))
    cache.store(chain, len(chain.tokens) // cache.block_size)


def kinds(events: list[KvEvent]) -> list[str]:
    """Event types and media, in order."""
    return [f"{event.__struct_config__.tag} {getattr(event, 'medium', '')}".strip() for event in events]


@pytest.fixture
def cache() -> BlockCache:
    """Eight blocks of four tokens."""
    return BlockCache(8, BLOCK_SIZE)


def test_prefix_is_reused(cache: BlockCache) -> None:
    """A second prompt with the same beginning hits its full blocks."""
    serve(cache, [*range(10)])

    assert Hit(2, 0) == serve(cache, [*range(9), 99, 98])


def test_last_token_is_always_computed(cache: BlockCache) -> None:
    """A prompt of whole blocks computes its last block again, and stores the same hash again."""
    serve(cache, [*range(8)])
    cache.take_events()

    hit = serve(cache, [*range(8)])

    (event,) = cache.take_events()
    assert isinstance(event, StoredBlocks)
    assert Hit(1, 0) == hit
    assert [*range(4, 8)] == event.token_ids
    assert event.parent_block_hash == Chain(token_ids(range(4)), BLOCK_SIZE).hashes[0]


def test_hash_is_cached_until_its_last_copy_is_removed(cache: BlockCache) -> None:
    """Three copies need three removals; after two the block is still hit."""
    for _ in range(3):
        serve(cache, [*range(4)])
    assert Hit(1, 0) == serve(cache, [*range(5)])  # a block of four was stored three times

    serve(cache, [*range(100, 100 + 4 * 7)])

    removals = [event for event in cache.take_events() if isinstance(event, RemovedBlocks)]
    assert 2 == len(removals)
    assert Hit(1, 0) == cache.lookup(Chain(token_ids(range(5)), BLOCK_SIZE), 1)


def test_generated_blocks_are_cached_without_the_last_token(cache: BlockCache) -> None:
    """(prompt + output[:-1]) // block size blocks can be hit."""
    serve(cache, [5, 6, 7], output=2)  # three prompt tokens, one computed answer token: one block

    assert Hit(1, 0) == serve(cache, [5, 6, 7, 0, 9])


def test_leaves_are_evicted_first(cache: BlockCache) -> None:
    """Of one idle request the tail is evicted before the head."""
    serve(cache, [*range(16)])
    cache.take_events()

    serve(cache, [*range(100, 100 + 4 * 5)])  # one block more than the four unused ones

    (removal,) = (event for event in cache.take_events() if isinstance(event, RemovedBlocks))
    assert [Chain(token_ids(range(16)), BLOCK_SIZE).hashes[-1]] == removal.block_hashes


def test_removals_precede_the_store(cache: BlockCache) -> None:
    """Removals come before the store that needs their blocks, one event each."""
    serve(cache, [*range(32)])
    cache.take_events()

    serve(cache, [*range(100, 112)])

    assert ["BlockRemoved GPU"] * 3 + ["BlockStored GPU"] == kinds(cache.take_events())


def test_held_blocks_are_not_evicted(cache: BlockCache) -> None:
    """If too few blocks are free nothing changes: no eviction, no event; the caller waits."""
    holder = Chain(token_ids(range(24)), BLOCK_SIZE)
    assert cache.open(holder, Hit(0, 0), 6, must_fit_blocks=6)
    late = Chain(token_ids(range(100, 112)), BLOCK_SIZE)

    assert not cache.open(late, Hit(0, 0), 3, must_fit_blocks=3)

    assert 2 == cache.free_blocks
    assert ([], []) == (late.blocks, cache.take_events())


def test_idle_hits_take_free_blocks(cache: BlockCache) -> None:
    """A hit on an idle block uses it: it no longer counts as free."""
    serve(cache, [*range(16)])
    holder = Chain(token_ids(range(100, 116)), BLOCK_SIZE)
    assert cache.open(holder, Hit(0, 0), 4, must_fit_blocks=4)
    again = Chain(token_ids(range(20)), BLOCK_SIZE)

    assert Hit(4, 0) == cache.lookup(again, 4)
    assert not cache.open(again, Hit(4, 0), 5, must_fit_blocks=5)


def test_clear(cache: BlockCache) -> None:
    """A reset empties the cache with an event; it fails while blocks are held."""
    serve(cache, [*range(8)])
    holder = Chain(token_ids(range(8)), BLOCK_SIZE)
    cache.open(holder, Hit(1, 0), 2, must_fit_blocks=2)
    assert not cache.clear()
    cache.release(holder)
    cache.take_events()

    assert cache.clear()

    cache.check()
    assert [ClearedBlocks()] == cache.take_events()
    assert Hit(0, 0) == serve(cache, [*range(8)])


def test_extra_keys(cache: BlockCache) -> None:
    """The LoRA name is in the keys of every block, the salt in the keys of the first block only."""
    serve(cache, [*range(8)], lora_name="adapter", salt="pepper")

    (event,) = cache.take_events()
    assert isinstance(event, StoredBlocks)
    assert "adapter" == event.lora_name
    assert [["adapter", "pepper"], ["adapter"]] == event.extra_keys


def test_evicted_blocks_move_to_the_host() -> None:
    """A block that leaves the device is first announced on the host, with all its keys; then it is a hit."""
    cache = BlockCache(2, BLOCK_SIZE, host_blocks=2)
    serve(cache, [*range(8)])
    serve(cache, [*range(100, 108)])
    events = cache.take_events()
    moved = [event for event in events if isinstance(event, StoredBlocks) and event.medium == CPU]

    hit = serve(cache, [*range(7)])

    stored, gone = f"BlockStored {CPU}", f"BlockRemoved {GPU}"
    assert [stored, gone, stored, gone] == kinds(events)[1:5]
    assert [[4, 5, 6, 7], [0, 1, 2, 3]] == [event.token_ids for event in moved]
    assert moved[0].parent_block_hash == moved[1].block_hashes[0]
    assert Hit(0, 1) == hit


def test_host_evicts_its_oldest() -> None:
    """A full host evicts a block first."""
    cache = BlockCache(1, BLOCK_SIZE, host_blocks=1)
    for start in (0, 100, 200):
        serve(cache, [*range(start, start + 4)])

    last = kinds(cache.take_events())[-4:]
    assert [f"BlockRemoved {CPU}", f"BlockStored {CPU}", f"BlockRemoved {GPU}", f"BlockStored {GPU}"] == last


def test_vllm_did_the_same() -> None:
    """30 requests served by a real vLLM with 99 blocks: same hits, same events, same evictions, in order."""
    requests = json.loads((DATA / "vllm_requests.json").read_text())["requests"][:30]
    frames = msgpack.unpackb((DATA / "vllm_capture.msgpack").read_bytes())
    theirs = [event for _, _, payload in frames for event in msgpack.unpackb(payload)[1]]
    cache = BlockCache(99, 32)

    for request in requests:
        assert request["cached_tokens"] == 32 * replay(cache, request).blocks

    ours = cache.take_events()
    names: dict[int | None, int | None] = {None: None}  # our hash for each hash of the recording
    assert [event.__struct_config__.tag for event in ours] == [event["type"] for event in theirs[: len(ours)]]
    assert all(is_same(*pair, names) for pair in zip(ours, theirs, strict=False))
    assert 65 == len(ours)
    assert any(isinstance(event, RemovedBlocks) for event in ours)


def replay(cache: BlockCache, request: dict[str, Any]) -> Hit:
    """One recorded request, with its recorded answer."""
    chain = Chain(token_ids(request["prompt_token_ids"]), 32)
    hit = cache.lookup(chain, (len(chain.tokens) - 1) // 32)
    blocks = -(-len(chain.tokens) // 32)
    assert cache.open(chain, hit, blocks, must_fit_blocks=blocks)
    cache.store(chain, len(chain.tokens) // 32)
    for token in request["output_token_ids"][:-1]:
        extend(cache, chain, token)
    cache.release(chain)
    return hit


def is_same(ours: KvEvent, theirs: dict[str, Any], names: dict[int | None, int | None]) -> bool:
    """Whether two events are equal, except for the hashes, which stored events map."""
    if isinstance(ours, StoredBlocks):
        pairs = zip(theirs["block_hashes"], ours.block_hashes, strict=True)
        known = all(names.setdefault(their, our) == our for their, our in pairs)
        parent = names[theirs["parent_block_hash"]] == ours.parent_block_hash
        return known and parent and theirs["token_ids"] == ours.token_ids
    assert isinstance(ours, RemovedBlocks)
    return [names[their] for their in theirs["block_hashes"]] == ours.block_hashes


@pytest.mark.parametrize("lookahead", [1, 3])
def test_lookahead(lookahead: int) -> None:
    """With look-ahead hashes each prompt reuses what vLLM 0.33's own KVCacheManager reused for it."""
    recorded = json.loads((DATA / "vllm_0.33_lookahead.json").read_text("utf-8"))
    cache = BlockCache(400, recorded["block_size"])
    steps = recorded["histories"][str(lookahead)]

    found = [
        serve(cache, step["tokens"], salt=step.get("salt"), lookahead=lookahead).device_blocks
        for step in steps
    ]

    assert [step["cached"] // cache.block_size for step in steps] == found
    stored = [event for event in cache.take_events() if isinstance(event, StoredBlocks)]
    assert all(len(event.block_hashes) == len(event.lookahead_token_ids or ()) for event in stored)


def test_lookahead_is_waited_for() -> None:
    """A block is named once the token behind it is known, also in an answer."""
    cache = BlockCache(8, BLOCK_SIZE)
    serve(cache, [*range(4)], output=2, lookahead=1)

    (stored,) = [event for event in cache.take_events() if isinstance(event, StoredBlocks)]
    assert ([0, 1, 2, 3], [[0]]) == (stored.token_ids, stored.lookahead_token_ids)
